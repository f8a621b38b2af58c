from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.shared import find_runs, no_runs
from engine.attention.split import cut
from engine.kernels.paged_decode import DecodeScratch, paged_decode

POISON = float("nan")


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
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, lengths: list[int], spare: int
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

    tiles = cut(np.array(lengths, np.int32), len(lengths) + spare)
    runs = no_runs(len(lengths))
    on = [
        torch.from_numpy(a).to(device)
        for a in (tiles.rows, tiles.starts, tiles.stops, tiles.firsts, tiles.counts, runs.seats, runs.members)
    ]
    indptr = torch.tensor([0, *np.cumsum(held)], dtype=torch.int32, device=device)
    scratch = DecodeScratch(len(lengths) + spare, len(lengths), heads, kv_heads, dim, device)
    scratch.out.fill_(POISON)
    scratch.stats.fill_(POISON)
    expected = reference(q, keys, values, tables, lengths)
    for _ in range(2):  # the counters are back at zero after the first
        out = torch.full_like(q, POISON, device=device)
        held_ids = torch.cat(tables).to(device)
        paged_decode(q.to(device), keys.to(device), values.to(device), *on, indptr, held_ids, scratch, out)
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
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    families: list[tuple[int, int]],
    spare: int,
) -> None:
    """families: blocks shared and rows that share them. Padding rows follow the real ones, as in a graph."""
    heads, kv_heads, dim = shape
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
    before = runs.before(real)
    most = real + len(runs.lengths) + spare
    tiles = cut(np.concatenate((np.array(lengths, np.int32) - before, runs.lengths)), most)
    skipped = np.concatenate((before, 0 * runs.lengths))[tiles.rows]
    owners = np.where(tiles.rows < real, tiles.rows, tiles.rows + 3).astype(np.int32)
    spread = [np.concatenate((a[:real], np.zeros(3, np.int32), a[real:])) for a in (tiles.firsts, tiles.counts)]
    seats = np.concatenate((runs.seats, np.full(3, -1, np.int32)))
    arrays = (owners, tiles.starts + skipped, tiles.stops + skipped, *spread, seats, runs.members)
    on = [torch.from_numpy(a).to(device) for a in arrays]
    scratch = DecodeScratch(most, 64, heads, kv_heads, dim, device)
    scratch.out.fill_(POISON)
    scratch.stats.fill_(POISON)
    expected = reference(q, keys, values, tables, lengths)
    on_device = [tensor.to(device) for tensor in (q, keys, values)]
    table_ends = torch.from_numpy(np.concatenate((indptr, indptr[-1:].repeat(3)))).to(device)
    for _ in range(2):
        out = torch.full_like(q, POISON, device=device)
        paged_decode(*on_device, *on, table_ends, held.to(device), scratch, out)
        error = (out[:real].flatten(1).cpu().double() - expected).norm() / expected.norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-6)
        assert out[real:].isnan().all()
    assert not scratch.arrived.any()
