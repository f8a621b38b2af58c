"""What a step finds on the device: checked on the CPU, where the copy is one from memory to memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.split import capacity
from engine.cuda.input import CudaInput
from engine.cuda.sampler import StepLaw
from engine.memory.memory import Memory
from tests.engine.plans import CPU, Row, plan

ROWS, STREAMS = 8, 33


@pytest.fixture
def buffers() -> CudaInput:
    return CudaInput(ROWS, 64, ROWS * 4, STREAMS, 2, Memory(CPU))


def law(count: int) -> StepLaw:
    rows = np.arange(count)
    return StepLaw(
        temperature=np.linspace(0.5, 1.0, count, dtype=np.float32),
        greedy=rows % 2 == 0,
        keys=np.arange(5 * count, dtype=np.int64).reshape(count, 5),
        top_k=rows + 10.0,
        top_p=1 - rows / 8,
        min_p=(rows / 16).astype(np.float32),
        edits=False,
        alternatives=False,
    )


def test_a_decode_step_is_padded_with_the_padding_slot_and_the_dummy_block(buffers: CudaInput) -> None:
    step = plan(Row(3, 17, [5, 6]), Row(0, 31, [7, 2]), Row(5, 0, [9]))
    buffers.pack_decode(0, step, law(3), 6)
    fixed = buffers.fixed
    assert fixed["slots"][:6].tolist() == [3, 0, 5, ROWS, ROWS, ROWS]
    assert fixed["positions"][:6].tolist() == [17, 31, 0, 0, 0, 0]
    assert fixed["write_slots"][:6].tolist() == [6 * 16 + 1, 2 * 16 + 15, 9 * 16, 0, 0, 0]
    assert fixed["block_ids"][:5].tolist() == [5, 6, 7, 2, 9]
    assert fixed["sample_slots"][:3].tolist() == [3, 0, 5]
    assert fixed["keys"][:15].tolist() == list(range(15))
    assert fixed["greedy"][:3].tolist() == [True, False, True]
    filters = [fixed[name][:3].tolist() for name in ("top_k", "top_p", "min_p")]
    assert filters == [[10, 11, 12], [1, 0.875, 0.75], [0, 0.0625, 0.125]]
    tiles = capacity(6, STREAMS)
    lengths = fixed["tile_tokens"][:tiles]
    read = torch.zeros(6, dtype=torch.int64).index_add_(0, fixed["tile_owners"][:tiles].long(), lengths.long())
    assert read.tolist() == [18, 32, 1, 0, 0, 0]


def test_a_smaller_step_after_a_larger_one_leaves_nothing_of_it(buffers: CudaInput) -> None:
    buffers.pack_decode(0, plan(*(Row(i, 40 + i, [1 + i, 11 + i, 21 + i]) for i in range(6))), law(6), 6)
    buffers.pack_decode(1, plan(Row(2, 5, [4])), law(1), 4)
    fixed = buffers.fixed
    assert fixed["slots"][:4].tolist() == [2, ROWS, ROWS, ROWS]
    assert fixed["write_slots"][:4].tolist() == [4 * 16 + 5, 0, 0, 0]
    assert int(fixed["tile_tokens"][: capacity(4, STREAMS)].sum()) == 6


def test_a_mixed_step_keeps_its_tokens_behind_its_blocks(buffers: CudaInput) -> None:
    step = plan(Row(1, 20, [3, 4]), Row(2, 16, [5, 6], [100, 101, 102]), Row(0, 0, [7], [103], samples=False))
    tokens = buffers.pack_eager(0, step, law(2))
    assert tokens.token_ids.tolist() == [100, 101, 102, 103]
    assert tokens.positions.tolist() == [20, 16, 17, 18, 0]
    assert tokens.write_slots.tolist() == [4 * 16 + 4, 6 * 16, 6 * 16 + 1, 6 * 16 + 2, 7 * 16]
    assert tokens.sample_tokens.tolist() == [0, 3]
    assert buffers.fixed["sample_slots"][:2].tolist() == [1, 2]
    assert buffers.fixed["block_ids"][:5].tolist() == [3, 4, 5, 6, 7]


def test_siblings_own_what_is_theirs_and_a_run_what_they_share() -> None:
    buffers = CudaInput(24, 64, 24 * 8, STREAMS, 2, Memory(CPU))
    shared = [1, 2, 3, 4, 5]
    rows = [Row(i, 5 * 16 + i, [*shared, 10 + 2 * i, 11 + 2 * i][: 6 + (i > 15)]) for i in range(17)]
    step = plan(*rows)
    buffers.pack_decode(0, step, law(17), 20)
    fixed, tiles = buffers.fixed, capacity(20, STREAMS)
    owners = fixed["tile_owners"][:tiles].long()
    lengths = fixed["tile_tokens"][:tiles].long()
    read = torch.zeros(24, dtype=torch.int64).index_add_(0, owners, lengths)
    assert read[:17].tolist() == [*range(1, 17), 97]
    assert read[17:20].tolist() == [0, 0, 0]
    assert read[20:].tolist() == [80, 80, 0, 0]  # 17 rows are two runs of eight and one row that reads all by itself
