from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.shared import find_runs, no_runs
from engine.attention.split import capacity
from engine.attention.tables import lay_out
from engine.kernels import paged_decode, tma_decode
from engine.kernels.paged_decode import DecodeScratch

POISON = float("nan")


@pytest.fixture(params=["triton", "tma"])
def decode(request: pytest.FixtureRequest, device: torch.device) -> Callable[..., None]:
    if request.param == "triton":
        return paged_decode.paged_decode
    if device.type == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0")
    return tma_decode.paged_decode


def reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: list[torch.Tensor], lengths: list[int]
):
    """float64 softmax attention, row by row."""
    out = []
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        k = keys[table].flatten(0, 1)[:length].double()
        v = values[table].flatten(0, 1)[:length].double()
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.einsum("hd,lhd->hl", q[row].double(), k).mul(q.shape[2] ** -0.5).softmax(-1)
        out.append(torch.einsum("hl,lhd->hd", weights, v).flatten())
    return torch.stack(out)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("lengths", [[1], [500], [16, 17, 15, 64, 65], [30, 900, 1, 128]])
@pytest.mark.parametrize("spare", [0, 9])
def test_equals_softmax_attention(
    decode: Callable[..., None],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[int],
    spare: int,
) -> None:
    if device.type == "cpu" and kv_heads == 8 and len(lengths) > 1:
        pytest.skip("takes long in the interpreter, where three KV heads show the same")
    generator = torch.Generator().manual_seed(sum(lengths))
    held = [-(-length // 16) for length in lengths]
    blocks = sum(held) + 3
    shape = (blocks, 16, kv_heads, dim)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    order = (torch.randperm(blocks - 1, generator=generator) + 1).int()
    tables = list(order[: sum(held)].split(held))
    for table, length in zip(tables, lengths, strict=True):  # nothing beyond a row's length may be read
        if length % 16:
            keys[table[-1], length % 16 :] = POISON
            values[table[-1], length % 16 :] = POISON
    keys[0] = values[0] = POISON
    q = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)

    indptr = np.cumsum([0, *held], dtype=np.int32)
    rows, streams = len(lengths), 1 + spare
    tokens = np.array(lengths, np.int32)
    layout = lay_out(tokens, no_runs(rows), rows, streams).at(tokens, indptr).on(device)
    scratch = DecodeScratch(capacity(rows, streams), rows, heads, kv_heads, dim, device)
    scratch.out.fill_(POISON)
    scratch.stats.fill_(POISON)
    expected = reference(q, keys, values, tables, lengths)
    for _ in range(2):  # the counters are back at zero after the first
        out = torch.full_like(q, POISON, device=device)
        held_ids = torch.cat(tables).to(device)
        decode(q.to(device), keys.to(device), values.to(device), layout, held_ids, scratch, out)
        assert (out.flatten(1).cpu().double() - expected).norm() / expected.norm() < (
            6e-3 if dtype == torch.bfloat16 else 1e-6
        )
    assert not scratch.arrived.any()


@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (3, 1, 16)])
@pytest.mark.parametrize(
    ("families", "spare"),
    [([(6, 8)], 0), ([(20, 3), (5, 8), (0, 2)], 3), ([(9, 11), (4, 2), (33, 1), (70, 4)], 16)],
)
def test_rows_that_share_a_prefix_equal_softmax_attention(
    decode: Callable[..., None],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    families: list[tuple[int, int]],
    spare: int,
) -> None:
    """families: blocks shared and rows that share them. Padding rows follow the real ones, as in a graph."""
    heads, kv_heads, dim = shape
    if decode is tma_decode.paged_decode and not tma_decode.fits(heads, kv_heads, dim, dtype):
        pytest.skip("written for heads of 64 and 128")
    if device.type == "cpu" and (kv_heads > 1 or len(families) > 3):
        pytest.skip("takes minutes in the interpreter, where one KV head and three families show the same")
    generator = torch.Generator().manual_seed(spare)
    own = torch.randint(1, 150, (sum(n for _, n in families),), generator=generator).tolist()
    fresh = iter(range(1, 10_000))
    tables, lengths = [], []
    for blocks, n in families:
        shared = [next(fresh) for _ in range(blocks)]
        for _ in range(n):
            tokens = own[len(tables)]
            tables.append(torch.tensor([*shared, *(next(fresh) for _ in range(-(-tokens // 16)))], dtype=torch.int32))
            lengths.append(16 * blocks + tokens)
    real, rows = len(tables), len(tables) + 3
    pool = (next(fresh), 16, kv_heads, dim)
    keys = torch.randn(pool, generator=generator).to(dtype)
    values = torch.randn(pool, generator=generator).to(dtype)
    keys[0] = values[0] = POISON
    order = torch.randperm(real, generator=generator).tolist()
    tables, lengths = [tables[i] for i in order], [lengths[i] for i in order]
    for table, length in zip(tables, lengths, strict=True):
        if length % 16:
            keys[table[-1], length % 16 :] = POISON
            values[table[-1], length % 16 :] = POISON
    q = torch.randn(rows, heads, dim, generator=generator).to(dtype)

    indptr = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    held = torch.cat(tables)
    runs = find_runs(indptr, held.numpy(), 50)
    assert len(runs.lengths) >= sum(n > 1 and blocks >= 4 for blocks, n in families)
    all_tokens = np.array(lengths, np.int32)
    layout = lay_out(all_tokens, runs, rows, 1 + spare).at(all_tokens, indptr).on(device)
    scratch = DecodeScratch(len(layout.tile_owners), 64, heads, kv_heads, dim, device)
    scratch.out.fill_(POISON)
    scratch.stats.fill_(POISON)
    expected = reference(q, keys, values, tables, lengths)
    on_device = [tensor.to(device) for tensor in (q, keys, values)]
    for _ in range(2):
        out = torch.full_like(q, POISON, device=device)
        decode(*on_device, layout, held.to(device), scratch, out)
        error = (out[:real].flatten(1).cpu().double() - expected).norm() / expected.norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-6)
        assert out[real:].isnan().all()
    assert not scratch.arrived.any()
