"""The slot table: rows in and out, and the few vectorised looks at it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.config import BLOCK_SIZE, EngineConfig
from engine.scheduling.phases import PausableClock, PhaseTimes
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import SlotTable
from tests.engine.host import ask

CONFIG = EngineConfig(max_running=4, max_step_tokens=64, max_context=128)


def sequence(name: str, prompt: int = 20, max_tokens: int = 10) -> Sequence:
    return Sequence(ask(name, prompt, max_tokens), 0, CONFIG.max_context, PhaseTimes(PausableClock(lambda: 0.0)))


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_lowest_free_slot_is_taken_and_stints_never_repeat() -> None:
    table = SlotTable(CONFIG)
    a, b, c = (sequence(name) for name in "abc")
    table.enter(a, [1, 2], 0)
    table.enter(b, [3, 4], 0)
    assert (a.slot, b.slot, table.num_running, table.num_free) == (0, 1, 2, 2)
    assert table.leave(a) == [1, 2]
    assert a.slot is None
    table.enter(c, [5, 6], 1)
    assert c.slot == 0
    assert table.stint.tolist() == [3, 2, 0, 0]
    assert table.computed.tolist() == [16, 0, 0, 0]
    assert table.running() == [c, b]


def test_what_was_sampled_goes_out_and_comes_back() -> None:
    table = SlotTable(CONFIG)
    a, b = sequence("a"), sequence("b")
    table.enter(a, [1, 2], 0)
    for i in range(3):
        table.record(array(0), array(20 + i), array(100 + i), np.full((3, 1), -float(i), np.float32))
    table.leave(a)
    assert a.ids[20:].tolist() == [100, 101, 102]
    np.testing.assert_array_equal(a.logprobs, np.repeat([[0.0, -1.0, -2.0]], 3, axis=0))
    assert a.sampled_mask().tolist() == [False] * 20 + [True] * 3
    table.enter(b, [3, 4], 0)
    table.enter(a, [1, 2], 0)
    assert (table.known[1], table.prefill_len[1]) == (23, 23)
    table.record(array(0, 1), array(20, 23), array(7, 103), np.array([[-9.0, -3.0]] * 3, np.float32))
    table.leave(a)
    assert a.ids[20:].tolist() == [100, 101, 102, 103]
    assert a.logprobs[0].tolist() == [0.0, -1.0, -2.0, -3.0]


def test_an_empty_slot_is_never_a_row() -> None:
    table = SlotTable(CONFIG)
    assert not table.decoding().any()
    a = sequence("a")
    table.enter(a, [1, 2], 0)
    assert not table.decoding().any(), "it has prompt ids to compute"
    table.computed[0] = 20
    assert table.decoding().tolist() == [True, False, False, False]
    table.computed[0] = a.last_position
    assert not table.decoding().any(), "its budget is launched"
    table.leave(a)
    assert not table.decoding().any()


def test_rows_at_the_end_of_their_last_block_are_short_of_one() -> None:
    table = SlotTable(CONFIG)
    for name in "abc":
        table.enter(sequence(name, 32), [ord(name), ord(name) + 10], 0)
    table.computed[:3] = 32, 33, 31
    table.num_blocks[1] = 3
    rows = np.array([True, True, True, False])
    assert table.short_of_block(rows).tolist() == [0]
    table.append_blocks(array(0), [77])
    assert table.blocks[0, :3].tolist() == [97, 107, 77]
    assert table.short_of_block(rows).tolist() == []


@given(data=st.data(), count=st.integers(1, 4))
def test_gathered_blocks_equal_a_plain_build(data: st.DataObject, count: int) -> None:
    table = SlotTable(CONFIG)
    table.blocks[:] = np.arange(table.blocks.size).reshape(table.blocks.shape)
    slots = array(*data.draw(st.permutations(range(4)))[:count])
    lengths = array(*(data.draw(st.integers(1, 128)) for _ in slots))
    indptr, ids = table.gather_blocks(slots, lengths)
    plain = [table.blocks[s, : -(-n // BLOCK_SIZE)].tolist() for s, n in zip(slots, lengths.tolist(), strict=True)]
    assert ids.tolist() == [block for row in plain for block in row]
    assert indptr.tolist() == [0, *np.cumsum([len(row) for row in plain]).tolist()]
    assert ids.dtype == indptr.dtype == np.int32


def test_more_blocks_than_ever_before_can_be_gathered() -> None:
    config = EngineConfig(max_running=64, max_step_tokens=64, max_context=1024)
    table = SlotTable(config)
    table.blocks[:] = np.arange(table.blocks.size).reshape(table.blocks.shape)
    slots = np.arange(64)
    _, ids = table.gather_blocks(slots, np.full(64, 1024))
    np.testing.assert_array_equal(ids, np.arange(64 * 64))


@given(steps=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), max_size=5))
def test_each_filled_block_is_taken_once_in_order(steps: list[list[int]]) -> None:
    table = SlotTable(CONFIG)
    names = "abc"
    for i, name in enumerate(names):
        table.enter(sequence(name, 128, 1), [100 * i + k for k in range(8)], 0)
    computed = np.zeros(3, np.int64)
    taken: list[tuple[int, int]] = []
    for step in steps:
        computed = np.minimum(computed + array(*step), 128)
        for slot, number, block, ids in table.take_unhashed(array(0, 1, 2), computed):
            assert block == 100 * slot + number
            ours = table.ids[slot, number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            assert ids == ours.tobytes()
            taken.append((slot, number))
    assert sorted(taken) == [(slot, k) for slot in range(3) for k in range(computed[slot] // BLOCK_SIZE)]
    for slot in range(3):
        numbers = [number for s, number in taken if s == slot]
        assert numbers == sorted(numbers)
