"""Hopper's decode attention where the other tests of both kernels do not reach: whole batches, and launches one after
the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.shared import find_runs, no_runs
from engine.attention.split import capacity, most_runs, num_streams
from engine.attention.tables import Tables, lay_out
from engine.kernels import paged_decode, tma_decode
from engine.kernels.overlap import between_linears
from engine.kernels.paged_decode import DecodeScratch
from engine.kernels.qk_norm_rope_write import qk_norm_rope_write

PAGE = 16
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not tma_decode.fits(32, 8, 128, torch.bfloat16):
        pytest.skip("written for compute capability 9.0")


class Step:
    """Rows of `lengths`, of which every `samples` begin with the same `prefix` tokens; pages lie anywhere."""

    def __init__(
        self, lengths: list[int], heads: int, kv_heads: int, dim: int, *, samples: int = 1, prefix: int = 0
    ) -> None:
        rows, shared = len(lengths), prefix // PAGE
        held = [-(-length // PAGE) - shared for length in lengths]
        groups = -(-rows // samples) if shared else 0
        generator = torch.Generator("cuda").manual_seed(sum(lengths))
        blocks = groups * shared + sum(held)
        ids = (torch.randperm(blocks, generator=generator, device="cuda") + 1).int().cpu()
        own = iter(ids[groups * shared :].split(held))
        tables = [
            torch.cat((ids[row // samples * shared :][:shared], next(own))) if shared else next(own)
            for row in range(rows)
        ]
        self.indptr = np.cumsum([0, *map(len, tables)], dtype=np.int32)
        self.ids = torch.cat(tables).cuda()
        pool = (blocks + 1, PAGE, kv_heads, dim)
        self.keys = torch.randn(pool, generator=generator, device="cuda").bfloat16()
        self.values = torch.randn(pool, generator=generator, device="cuda").bfloat16()
        for table, length in zip(tables, lengths, strict=True):
            if length % PAGE:
                self.keys[int(table[-1]), length % PAGE :] = float("nan")
                self.values[int(table[-1]), length % PAGE :] = float("nan")
        self.keys[0] = self.values[0] = float("nan")
        self.q = torch.randn(rows, heads, dim, generator=generator, device="cuda").bfloat16()
        self.lengths = np.array(lengths, np.int32)
        self.scratch = DecodeScratch(capacity(rows, num_streams(kv_heads)), rows, heads, kv_heads, dim, DEVICE)

    def tables(self, *, share: bool = True) -> Tables[torch.Tensor]:
        rows, kv_heads = len(self.lengths), self.keys.shape[2]
        runs = find_runs(self.indptr, self.ids.cpu().numpy(), most_runs(rows)) if share else no_runs(rows)
        layout = lay_out(self.lengths, runs, rows, num_streams(kv_heads))
        return layout.at(self.lengths, self.indptr).on(DEVICE)

    def run(self, kernel: object, tables: Tables[torch.Tensor]) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        kernel(self.q, self.keys, self.values, tables, self.ids, self.scratch, out)  # type: ignore[operator]
        return out


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


SHAPES = [(32, 8, 128), (16, 8, 128), (28, 4, 128), (64, 8, 128), (32, 8, 64), (14, 2, 64), (8, 8, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "lengths",
    [[768] * 256, [1024] * 63 + [16_384], [4096] * 3 + [32_768], list(range(1, 257)), [64], [65], [9000]],
    ids=["equal", "tail", "long", "all", "step", "more", "alone"],
)
def test_it_agrees_with_the_other_kernel(shape: tuple[int, int, int], lengths: list[int]) -> None:
    step = Step(lengths, *shape)
    tables = step.tables()
    expected = step.run(paged_decode.paged_decode, tables)
    assert distance(step.run(tma_decode.paged_decode, tables), expected) < 4e-3
    assert not step.scratch.arrived.any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prefix", [64, 1024, 5120])
def test_rows_that_share_a_prefix_see_it_as_rows_that_do_not(shape: tuple[int, int, int], prefix: int) -> None:
    step = Step([prefix + 1 + 7 * row for row in range(61)], *shape, samples=8, prefix=prefix)
    tables = step.tables()
    assert (tables.seats >= 0).sum() >= 56
    apart = step.run(tma_decode.paged_decode, step.tables(share=False))
    assert distance(step.run(tma_decode.paged_decode, tables), apart) < 4e-3
    assert not step.scratch.arrived.any()


@pytest.mark.parametrize("prefix", [0, 512])
def test_a_thousand_launches_one_after_the_other_give_the_same_bits(prefix: int) -> None:
    """In a graph each begins before the one ahead has ended, tiles are put together by whoever comes last, and the
    counters are used again and again."""
    step = Step([prefix + 100 + 37 * row for row in range(100)], 32, 8, 128, samples=4, prefix=prefix)
    tables = step.tables()
    expected = step.run(tma_decode.paged_decode, tables)
    torch.cuda.synchronize()
    outs = step.q.new_empty(100, *step.q.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:
            tma_decode.paged_decode(step.q, step.keys, step.values, tables, step.ids, step.scratch, out)
    for _ in range(10):
        outs.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("length", [5, 700], ids=["all read ahead", "more than is read ahead"])
def test_it_waits_for_what_writes_its_queries_and_newest_keys_and_values(length: int) -> None:
    """As in the model's graph: the launch ahead writes them, and lets this one begin before it does."""
    step = Step([length + 2 * row for row in range(64)], 32, 8, 128)
    tables = step.tables()
    last = torch.from_numpy(step.lengths - 1).cuda()
    places = step.ids[torch.from_numpy(step.indptr[:-1]).cuda() + last // PAGE].long() * PAGE + last % PAGE
    qkv = torch.randn(20, 64, (32 + 2 * 8) * 128, device="cuda").bfloat16() * 3
    unturned = torch.tensor([1.0, 0.0], device="cuda")[None, :, None].expand(64, 2, 128).contiguous()
    outs = step.q.new_empty(20, *step.q.shape)
    assert between_linears(64, DEVICE)

    def layer(i: int) -> None:
        q = qk_norm_rope_write(qkv[i], None, 1e-6, unturned, places, step.keys, step.values)
        tma_decode.paged_decode(q, step.keys, step.values, tables, step.ids, step.scratch, outs[i])

    for i in range(20):
        layer(i)
        torch.cuda.synchronize()
    expected = outs.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):
            layer(i)
    for _ in range(20):
        outs.fill_(float("nan"))
        graph.replay()
        assert torch.equal(outs, expected)


def test_the_kernel_is_there_before_the_first_call() -> None:
    tma_decode.prepare(32, 8, 128)
    loaded = tma_decode.kernel.cache_info().misses
    step = Step([100], 32, 8, 128)
    step.run(tma_decode.paged_decode, step.tables())
    assert tma_decode.kernel.cache_info().misses == loaded
