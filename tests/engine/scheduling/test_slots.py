"""The slot table: rows in and out, and the few vectorised looks at it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.scheduling.phases import PausableClock, PhaseTimes
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import NEVER, SlotTable
from tests.engine.host import ask

CONFIG = EngineConfig(max_running=4, max_step_tokens=64, max_context=128)


def sequence(name: str, prompt: int = 20, max_tokens: int = 10) -> Sequence:
    return Sequence(ask(name, prompt, max_tokens), 0, CONFIG.max_context, PhaseTimes(PausableClock(lambda: 0.0)))


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_lowest_free_slot_is_taken_and_a_later_tenant_is_told_from_an_earlier_one() -> None:
    table = SlotTable(CONFIG)
    a, b, c = (sequence(name) for name in "abc")
    table.enter(a, [1, 2], 0, step=4)
    table.enter(b, [3, 4], 0, step=4)
    assert (a.slot, b.slot, table.num_running, table.num_free) == (0, 1, 2, 2)
    assert table.leave(a) == [1, 2]
    assert a.slot is None
    assert table.first_step.tolist() == [NEVER, 4, NEVER, NEVER]
    table.enter(c, [5, 6], 1, step=6)
    assert c.slot == 0
    assert table.first_step.tolist() == [6, 4, NEVER, NEVER]
    assert table.computed.tolist() == [16, 0, 0, 0]
    assert table.running() == [c, b]


def test_what_was_sampled_goes_out_and_comes_back() -> None:
    table = SlotTable(CONFIG)
    a, b = sequence("a"), sequence("b")
    table.enter(a, [1, 2], 0, step=0)
    for i in range(3):
        table.record(array(0), array(20 + i), array(100 + i), np.full((3, 1), -float(i), np.float32))
    table.leave(a)
    assert a.ids[:20].tolist() == a.request.token_ids.tolist()
    assert a.ids[20:].tolist() == [100, 101, 102]
    np.testing.assert_array_equal(a.logprobs, np.repeat([[0.0, -1.0, -2.0]], 3, axis=0))
    assert a.sampled_mask().tolist() == [False] * 20 + [True] * 3
    table.enter(b, [3, 4], 0, step=5)
    table.enter(a, [1, 2], 0, step=5)
    assert table.known.tolist() == [20, 23, 0, 0]
    table.record(array(0, 1), array(20, 23), array(7, 103), np.array([[-9.0, -3.0]] * 3, np.float32))
    table.leave(a)
    assert a.ids[20:].tolist() == [100, 101, 102, 103]
    assert a.logprobs[0].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert a.ids.dtype == np.int32
    assert a.logprobs.dtype == np.float32


def test_an_empty_slot_is_never_a_row() -> None:
    table = SlotTable(CONFIG)
    assert table.decoding().tolist() == []
    a, b = sequence("a"), sequence("b")
    table.enter(a, [1, 2], 0, step=0)
    table.enter(b, [3, 4], 0, step=0)
    assert table.decoding().tolist() == [], "they have prompt ids to compute"
    table.computed[:2] = 20
    table.last_position[:2] = a.last_position
    assert table.decoding().tolist() == [0, 1]
    table.computed[0] = a.last_position
    assert table.decoding().tolist() == [1], "its budget is launched"
    table.leave(b)
    assert table.decoding().tolist() == []


def test_rows_at_the_end_of_their_last_block_are_short_of_one() -> None:
    table = SlotTable(CONFIG)
    for name in "abc":
        table.enter(sequence(name, 32), [ord(name), ord(name) + 10], 0, step=0)
    table.computed[:3] = 32, 33, 31
    assert table.short_of_block(array(0, 1, 2)).tolist() == [0]
    table.append_blocks(array(0, 2), [77, 2**31 - 1])
    assert [table.blocks_of(slot) for slot in range(4)] == [[97, 107, 77], [98, 108], [99, 109, 2**31 - 1], []]


@given(data=st.data(), count=st.integers(1, 4))
@settings(deadline=None)
def test_gathered_blocks_equal_a_plain_build(data: st.DataObject, count: int) -> None:
    """Rows that decode hold what they need, those that prefill what they will need."""
    table = SlotTable(CONFIG)
    for i, name in enumerate("abcd"):
        table.enter(sequence(name), [100 * i + k for k in range(data.draw(st.integers(1, 8)))], 0, step=0)
    slots = array(*data.draw(st.permutations(range(4)))[:count])
    held = [table.blocks_of(slot) for slot in slots.tolist()]
    num_decode = data.draw(st.integers(0, count))
    fewest = [len(row) if i < num_decode else 1 for i, row in enumerate(held)]
    covered = [data.draw(st.integers(low, len(row))) for low, row in zip(fewest, held, strict=True)]
    lengths = np.array([data.draw(st.integers(16 * n - 15, 16 * n)) for n in covered], np.int32)
    indptr, ids = table.gather_blocks(slots, lengths, num_decode)
    plain = [row[:n] for n, row in zip(covered, held, strict=True)]
    assert ids.tolist() == [block for row in plain for block in row]
    assert indptr.tolist() == [0, *np.cumsum(covered).tolist()]
    assert ids.dtype == indptr.dtype == np.int32
