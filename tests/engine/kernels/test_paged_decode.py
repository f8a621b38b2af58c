from __future__ import annotations

import numpy as np
import pytest
import torch

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
    on = [torch.from_numpy(a).to(device) for a in (tiles.rows, tiles.starts, tiles.stops, tiles.firsts, tiles.counts)]
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
