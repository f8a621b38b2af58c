"""Decode attention alone on the GPU: every path over batch, context and skew, one layer call, in a CUDA graph.

    python -m bench.attention [--quick] [--json FILE]

Paths: `split` is FlashInfer's graph wrapper, planned for the real lengths; `one_chunk` its ordinary wrapper planned
once without splitting; `eager` the ordinary wrapper outside a graph, its plan() not counted; `tiles` is ours, and
`runs` is ours with prefixes that several rows share read once. The pages are scattered, enough layers are cycled to
defeat the L2, every output is poisoned and compared with `eager`. Times are microseconds of one layer, the median of
replays. The second table is of groups: n samples that share the pages of one prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from bench.gpu_time import median_us
from bench.measure import COPY_BANDWIDTH
from bench.report_fields import clean, commit, device_name, versions, write
from engine.attention.paged_step import choose_decode_kernel
from engine.attention.shared import Runs, find_runs, no_runs
from engine.attention.split import capacity, most_runs, num_streams
from engine.attention.tables import lay_out
from engine.kernels.paged_decode import DecodeScratch

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BYTES_PER_TOKEN = 2 * KV_HEADS * DIM * 2
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Batch:
    lengths: np.ndarray
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    q: list[torch.Tensor]


def make(lengths: np.ndarray) -> Batch:
    held = -(-lengths // PAGE)
    return with_pages(lengths, torch.randperm(int(held.sum()), device=DEVICE).int() + 1)


def make_groups(groups: int, samples: int, prefix: int, suffix: int) -> Batch:
    """Rows of a group lie side by side, and share the pages of their prefix."""
    own = -(-suffix // PAGE)
    pages = torch.randperm(groups * (prefix // PAGE + samples * own), device=DEVICE).int() + 1
    shared = pages[: groups * (prefix // PAGE)].view(groups, 1, -1).expand(-1, samples, -1)
    private = pages[groups * (prefix // PAGE) :].view(groups, samples, own)
    lengths = np.full(groups * samples, prefix + suffix, np.int32)
    return with_pages(lengths, torch.cat((shared, private), 2).flatten())


def with_pages(lengths: np.ndarray, indices: torch.Tensor) -> Batch:
    held = -(-lengths // PAGE)
    blocks = int(indices.max()) + 1
    layer_bytes = blocks * PAGE * BYTES_PER_TOKEN
    layers = max(2, min(36, int(400e6 // layer_bytes) + 1))
    pool = [torch.randn(2, blocks, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]
    return Batch(
        lengths=lengths,
        indptr=torch.from_numpy(np.concatenate(([0], np.cumsum(held))).astype(np.int32)),
        indices=indices,
        last_page=torch.from_numpy(((lengths - 1) % PAGE + 1).astype(np.int32)),
        keys=[kv[0] for kv in pool],
        values=[kv[1] for kv in pool],
        q=[torch.randn(len(lengths), HEADS, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)],
    )


WORKSPACE = torch.zeros(384 * 2**20, dtype=torch.uint8, device=DEVICE)
PLAN = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "page_size": PAGE}
DTYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
Call = Callable[[int], torch.Tensor]


def flashinfer_call(batch: Batch, wrapper: BatchDecodeWithPagedKVCacheWrapper) -> Call:
    return lambda i: wrapper.run(batch.q[i], (batch.keys[i], batch.values[i]))


def eager(batch: Batch) -> Call:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    wrapper.plan(batch.indptr, batch.indices, batch.last_page, **PLAN, **DTYPES)
    return flashinfer_call(batch, wrapper)


def split(batch: Batch) -> Call:
    rows = len(batch.lengths)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE,
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE),
        paged_kv_indices_buffer=torch.zeros(len(batch.indices), dtype=torch.int32, device=DEVICE),
        paged_kv_last_page_len_buffer=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )
    wrapper.plan(batch.indptr, batch.indices, batch.last_page, **PLAN, **DTYPES)
    return flashinfer_call(batch, wrapper)


def one_chunk(batch: Batch) -> Call:
    rows = len(batch.lengths)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    ones = torch.ones(rows, dtype=torch.int32)
    indices = batch.indices.clone()
    wrapper.plan(torch.arange(rows + 1, dtype=torch.int32), indices, ones, disable_split_kv=True, **PLAN, **DTYPES)
    wrapper._paged_kv_indptr_buf.copy_(batch.indptr)
    wrapper._paged_kv_last_page_len_buf.copy_(batch.last_page)
    return flashinfer_call(batch, wrapper)


def tiles(batch: Batch) -> Call:
    return cut_call(batch, no_runs(len(batch.lengths)))


def runs(batch: Batch) -> Call:
    return cut_call(batch, find_runs(batch.indptr.numpy(), batch.indices.cpu().numpy(), most_runs(len(batch.lengths))))


def cut_call(batch: Batch, sharing: Runs) -> Call:
    kernel = choose_decode_kernel(HEADS, KV_HEADS, DIM, torch.bfloat16)
    rows, streams = len(batch.lengths), num_streams(KV_HEADS)
    tables = lay_out(batch.lengths, sharing, rows, streams).at(batch.lengths, batch.indptr.numpy()).on(DEVICE)
    scratch = DecodeScratch(capacity(rows, streams), rows, HEADS, KV_HEADS, DIM, DEVICE)

    def call(i: int) -> torch.Tensor:
        out = torch.empty_like(batch.q[i])
        kernel(batch.q[i], batch.keys[i], batch.values[i], tables, batch.indices, scratch, out)
        return out

    return call


def replay_us(batch: Batch, call: Call) -> tuple[float, list[torch.Tensor]]:
    """Microseconds a layer in a graph of all layers, and the outputs of the last replay."""
    layers = range(len(batch.q))
    for i in layers:
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(i) for i in layers]
    for out in outputs:
        out.fill_(float("nan"))
    return median_us(graph.replay, len(outputs)), outputs


def measure(batch: Batch, tokens: int, **candidates: Callable[[Batch], Call]) -> dict[str, float]:
    """tokens: whose KV has to be read at least."""
    call, layers = eager(batch), range(len(batch.q))
    eager_us = median_us(lambda: [call(i) for i in layers], len(layers))
    row = {"floor": tokens * BYTES_PER_TOKEN / COPY_BANDWIDTH["NVIDIA H200"] * 1e6, "eager": eager_us}
    expected = call(0).flatten(1).double()
    for name, candidate in candidates.items():
        row[name], outputs = replay_us(batch, candidate(batch))
        error = (outputs[0].flatten(1).double() - expected).norm() / expected.norm()
        row[f"{name}_error"] = float(error)
        assert error < 1e-2, f"{name} is wrong: {error}"
    torch.cuda.empty_cache()
    return row


def show(name: str, row: dict[str, float]) -> None:
    times = " ".join(f"{key} {value:8.1f}" for key, value in row.items() if "error" not in key)
    print(f"{name:26} {times}", flush=True)


def sweep(quick: bool) -> Iterator[dict[str, object]]:
    points = (
        [(1, 512), (1, 2048), (1, 8192), (8, 320), (16, 320), (8, 2048), (64, 800), (64, 1024), (256, 800), (256, 2048)]
        if quick
        else [(batch, context) for batch in (1, 4, 16, 64, 256) for context in (512, 2048, 8192, 32768)]
    )
    for batch, context in points:
        for skew in (False, True):
            if skew and (batch == 1 or (quick and batch < 64)):
                continue
            lengths = np.full(batch, context, np.int32)
            if skew:
                lengths[-1] *= 16
            if int(lengths.sum()) * BYTES_PER_TOKEN > 45e9:
                continue
            row = measure(make(lengths), int(lengths.sum()), split=split, one_chunk=one_chunk, tiles=tiles)
            show(f"{batch:4} x {context:5} {'skew' if skew else ''}", row)
            yield {"batch": batch, "context": context, "skew": skew, **row}


def group_sweep() -> Iterator[dict[str, object]]:
    for groups, samples, prefix, suffix in (
        *((64, 8, 1024, suffix) for suffix in (128, 256, 640, 1024)),
        (32, 8, 1024, 256),
        (16, 16, 1024, 256),
        (8, 8, 1024, 256),
        (64, 8, 256, 256),
        (16, 8, 12000, 1000),
        (2, 8, 1024, 256),
    ):
        tokens = groups * (prefix + samples * suffix)
        row = measure(make_groups(groups, samples, prefix, suffix), tokens, split=split, tiles=tiles, runs=runs)
        show(f"{groups:3} x {samples:2}, {prefix:5} + {suffix:4}", row)
        yield {"groups": groups, "samples": samples, "prefix": prefix, "suffix": suffix, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen points instead of the whole sweep")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    rows = {"groups": list(group_sweep()), "rows": list(sweep(args.quick))}
    if args.json:
        where = {"device": device_name("cuda"), "commit": commit(), "clean": clean(), "versions": versions()}
        write({"kind": "attention"} | where | rows, args.json)


if __name__ == "__main__":
    main()
