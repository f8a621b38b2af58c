"""What a step finds on the device: checked on the CPU, where the copy is one from memory to memory."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.paged_step import DecodeStep
from engine.attention.shared import MEMBERS
from engine.attention.split import capacity
from engine.config import BLOCK_SIZE
from engine.cuda.graphs import bucket_for, buckets
from engine.cuda.input import TOKEN_ARRAYS, CudaInput
from engine.cuda.sampler import StepLaw
from engine.memory.memory import Memory
from tests.engine.plans import CPU, Row, plan, start

ROWS, STREAMS = 8, 33


@pytest.fixture
def buffers() -> CudaInput:
    return CudaInput(ROWS, 64, ROWS * 4, STREAMS, 2, Memory(CPU))


@pytest.fixture(autouse=True)
def sharing_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.input.LEAST_SAVED", 0)


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


def test_a_mixed_step_lays_out_its_tokens_and_writes_padding_to_the_dummy_block(buffers: CudaInput) -> None:
    for array in buffers.fixed.values():
        array.fill_(1)
    step = plan(Row(1, 20, [3, 4]), Row(2, 16, [5, 6], [100, 101, 102]), Row(0, 0, [7], [103], samples=False))
    _, sample_tokens = buffers.pack_mixed(0, step, law(2), 8)
    ids, positions, write_slots = (buffers.fixed[name][:9].tolist() for name in TOKEN_ARRAYS)
    assert ids[1:] == [100, 101, 102, 103, 0, 0, 0, 1]
    assert positions == [20, 16, 17, 18, 0, 0, 0, 0, 1]
    assert write_slots == [4 * 16 + 4, 6 * 16, 6 * 16 + 1, 6 * 16 + 2, 7 * 16, 0, 0, 0, 1]
    assert sample_tokens.tolist() == [0, 3]
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


@pytest.mark.parametrize(("blocks", "shares"), [(178, False), (179, True)])
def test_what_saves_little_is_read_apart(blocks: int, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.input.LEAST_SAVED", 40_000)  # 14 x 179 x 16 tokens are 96 more
    buffers = CudaInput(16, 64, 16 * 200, STREAMS, 2, Memory(CPU))
    shared = [range(1 + 200 * group, 1 + 200 * group + blocks) for group in range(2)]
    rows = [Row(i, blocks * BLOCK_SIZE, [*shared[i // 8], 500 + i]) for i in range(16)]
    buffers.pack_decode(0, plan(*rows), law(16), 16)
    assert (buffers.fixed["seats"][:16] >= 0).tolist() == [shares] * 16


def test_slots_that_all_start_again_at_once_share_no_more_than_their_new_rows_do() -> None:
    """The step in which they start has no decode row, and the next one has the slots of the last one before."""
    buffers = CudaInput(24, 512, 24 * 8, STREAMS, 2, Memory(CPU))
    shared, slots = [1, 2, 3, 4, 5], range(17)
    buffers.pack_decode(0, plan(*(Row(slot, 5 * 16, [*shared, 10 + slot]) for slot in slots)), law(17), 20)
    assert (buffers.fixed["seats"][:16] >= 0).all()
    chunks = (Row(slot, 0, [30 + 2 * slot, 31 + 2 * slot], range(20)) for slot in slots)
    buffers.pack_mixed(1, plan(*chunks, starts=[start(slot) for slot in slots]), law(17), 17 * 20)
    buffers.pack_decode(0, plan(*(Row(slot, 20, [30 + 2 * slot, 31 + 2 * slot]) for slot in slots)), law(17), 20)
    assert buffers.fixed["seats"][:20].tolist() == [-1] * 20
    assert tokens_read(buffers, 17, 20) == [
        [*range((30 + 2 * slot) * BLOCK_SIZE, (30 + 2 * slot) * BLOCK_SIZE + 21)] for slot in slots
    ]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_steps_before_were_a_row_reads_its_own_tokens(seed: int) -> None:
    """Rows with shared prefixes come and go, some or all at once, and graphs of all sizes and eager steps alternate."""
    most, rng, fresh = 40, np.random.default_rng(seed), count(1)
    buffers = CudaInput(most, 4096, most * 64, STREAMS, 2, Memory(CPU))
    held: dict[int, tuple[list[int], int]] = {}  # by slot: blocks, and tokens that lie there
    for turn in range(60):
        chunks = []
        if not held or rng.random() < 0.2:
            going = 1.0 if rng.random() < 0.5 else 0.5
            held = {slot: row for slot, row in held.items() if rng.random() > going}
            free = [slot for slot in range(most) if slot not in held]
            while free and rng.random() < 0.9:
                shared = [next(fresh) for _ in range(rng.integers(12))]
                for slot in free[: rng.integers(1, 14)]:
                    free.remove(slot)
                    new = int(rng.integers(1, 90))
                    blocks = [*shared, *(next(fresh) for _ in range(-(-new // BLOCK_SIZE)))]
                    chunks.append(Row(slot, len(shared) * BLOCK_SIZE, blocks, range(new)))
        decodes = []
        for slot, (blocks, tokens) in sorted(held.items()):
            if tokens % BLOCK_SIZE == 0:
                blocks.append(next(fresh))
            decodes.append(Row(slot, tokens, list(blocks)))
            held[slot] = blocks, tokens + 1
        if not decodes and not chunks:
            continue
        rows = len(decodes)
        if chunks:
            step = plan(*decodes, *chunks, starts=[start(chunk.slot) for chunk in chunks])
            buffers.pack_mixed(turn % 2, step, law(step.num_rows), step.num_tokens)
        else:
            rows = bucket_for(rows, buckets(most)) or most
            buffers.pack_decode(turn % 2, plan(*decodes), law(len(decodes)), rows)
        held |= {row.slot: (list(row.blocks), row.context + len(row.token_ids or ())) for row in chunks}
        if decodes:
            places = [
                [block * BLOCK_SIZE + place for block in row.blocks for place in range(BLOCK_SIZE)] for row in decodes
            ]
            assert tokens_read(buffers, len(decodes), rows) == [
                own[: row.context + 1] for own, row in zip(places, decodes, strict=True)
            ]


def tokens_read(buffers: CudaInput, decodes: int, rows: int) -> list[list[int]]:
    """The places in the pool that attention reads for each decode row of the step, by its run and by itself."""
    nothing: Any = None
    step = DecodeStep.of(buffers.fixed, rows, nothing, nothing)
    tables, ids = step.tables, step.block_ids.tolist()
    firsts, counts = tables.first_tiles.tolist(), tables.tile_counts.tolist()

    def places(owner: int) -> list[int]:
        found = []
        for tile in range(firsts[owner], firsts[owner] + counts[owner]):
            assert tables.tile_owners[tile] == owner
            begin, tokens = int(tables.tile_blocks[tile]), int(tables.tile_tokens[tile])
            found += [ids[begin + token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(tokens)]
        return found

    seats = tables.seats.tolist()
    runs = {seat // MEMBERS for seat in seats if seat >= 0}
    used = sum(counts[:rows]) + sum(counts[rows + run] for run in runs)
    assert tables.streams[0] == 0
    assert tables.streams[-1] == used
    assert not tables.tile_tokens[used:].any()
    assert not any(counts[decodes:rows])
    assert all(tables.members[seat] == row for row, seat in enumerate(seats) if seat >= 0)
    return [(places(rows + seats[row] // MEMBERS) if seats[row] >= 0 else []) + places(row) for row in range(decodes)]
