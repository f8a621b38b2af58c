"""Paged attention against a float64 softmax over each row's own tokens, in a pool that is NaN everywhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.memory.memory import Memory
from engine.model.config import ModelConfig, parse_model_config
from engine.runner.input import StepBuffer, StepInput
from tests.engine.plans import Row, plan
from tests.rigs import RandModel

CPU = torch.device("cpu")
BLOCKS = 64


def config_of(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    return parse_model_config(RandModel(heads=heads, kv_heads=kv_heads, head_dim=dim).config())


def packed(decodes: list[int], chunks: list[tuple[int, int]], seed: int = 0) -> tuple[StepInput, list[list[int]]]:
    """decodes: kv lengths, the token of this step included. chunks: (context, queries). Blocks are dealt at random."""
    free = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()

    def deal(length: int) -> list[int]:
        return [free.pop() for _ in range(-(-length // 16))]

    rows = [Row(i, length - 1, deal(length)) for i, length in enumerate(decodes)]
    rows += [Row(len(rows) + i, context, deal(context + n), [1] * n) for i, (context, n) in enumerate(chunks)]
    step = StepBuffer(len(rows), 400, 200, Memory(CPU)).pack(plan(*rows))
    return step, [list(row.blocks) for row in rows]


def expected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: StepInput, blocks: list[list[int]]
) -> torch.Tensor:
    out, token = [], 0
    lengths = [(int(step.kv_lens[i]) - 1, 1) for i in range(step.num_decode)]
    lengths += [(chunk.context, chunk.length) for chunk in step.chunks]
    group = q.shape[1] // keys.shape[2]
    for (context, count), held in zip(lengths, blocks, strict=True):
        k, v = (cache[held].double().flatten(0, 1).repeat_interleave(group, 1) for cache in (keys, values))
        for position in range(context, context + count):
            seen_k, seen_v = k[: position + 1], v[: position + 1]
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q[token].double(), seen_k) * q.shape[2] ** -0.5, -1)
            out.append(torch.einsum("hl,lhd->hd", weights, seen_v).flatten())
            token += 1
    return torch.stack(out)


CASES: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one row": ([37], []),
    "one token": ([1], []),
    "equal lengths": ([16, 16, 16], []),
    "block edges": ([1, 15, 16, 17, 31, 32, 33], []),
    "one long among short": ([200, 2, 3, 1], []),
    "first chunk": ([], [(0, 23)]),
    "one-token chunks": ([], [(0, 1), (5, 1), (16, 1)]),
    "later chunks": ([], [(16, 16), (7, 30), (33, 2)]),
    "mixed": ([5, 40, 1], [(0, 17), (48, 20), (3, 1)]),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (6, 1, 8), (2, 2, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_a_rows_own_tokens_and_nothing_else(
    case: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    config = config_of(heads, kv_heads, dim)
    step, blocks = packed(*CASES[case])
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.full((2, BLOCKS, 16, kv_heads, dim), float("nan"), dtype=dtype)
    for held, length in zip(blocks, step.kv_lens.tolist(), strict=True):
        for cache in (keys, values):
            flat = cache[held].flatten(0, 1)
            flat[:length] = torch.randn(length, kv_heads, dim, generator=generator).to(dtype)
            cache[held] = flat.unflatten(0, (-1, 16))
    q = torch.randn(step.num_tokens, heads, dim, generator=generator).to(dtype)
    with torch.inference_mode():
        found = TorchPagedAttention(config, dtype, CPU).plan(step).attend(q, keys, values)
    assert found.shape == (step.num_tokens, heads * dim)
    assert found.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected(q, keys, values, step, blocks), rtol=tolerance, atol=tolerance)


def test_a_row_of_nan_stays_alone() -> None:
    """A row that went wrong holds NaN in its own blocks; its neighbours, gathered beside it, do not notice."""
    config = config_of(4, 2, 32)
    step, blocks = packed([20, 35, 9], [(10, 7)])
    keys, values = torch.randn(2, BLOCKS, 16, 2, 32)
    q = torch.randn(step.num_tokens, 4, 32)
    attention = TorchPagedAttention(config, torch.float32, CPU)
    before = attention.plan(step).attend(q, keys, values)
    keys[blocks[1]] = values[blocks[1]] = float("nan")
    after = attention.plan(step).attend(q, keys, values)
    assert after[1].isnan().all()
    rest = [0, *range(2, step.num_tokens)]
    assert torch.equal(after[rest], before[rest])
