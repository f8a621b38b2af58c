import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.penalties import ANYWHERE, SAMPLED, Penalties, SlotRows

VOCAB = 12
CPU = torch.device("cpu")
HISTORY = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=20)


def arrays(history: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([token for token, _ in history], np.int32), np.array([was for _, was in history], bool)


def count(history: list[tuple[int, bool]]) -> np.ndarray:
    out = np.zeros((2, VOCAB), np.int32)
    for token, was in history:
        out[ANYWHERE, token] += 1
        out[SAMPLED, token] += was
    return out


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@settings(max_examples=50, deadline=None)
@given(HISTORY, HISTORY, st.lists(st.integers(0, VOCAB - 1), max_size=5))
def test_counts_grow_by_what_was_sampled_as_if_rebuilt(one: list, other: list, tokens: list[int]) -> None:
    """Rule 11: a preempted slot, rebuilt from ids, goes on as the one that was never preempted."""
    penalties = Penalties(VOCAB, 4, CPU)
    penalties.start(3, *arrays(one))
    penalties.start(1, *arrays(other))
    for token in tokens:
        penalties.add(slots(3), torch.tensor([token]))
    grown = penalties.counts(slots(1, 3)).numpy()
    np.testing.assert_array_equal(grown[0], count(other))
    np.testing.assert_array_equal(grown[1], count(one + [(token, True) for token in tokens]))

    penalties.start(1, *arrays(one + [(token, True) for token in tokens]))
    np.testing.assert_array_equal(penalties.counts(slots(1)).numpy()[0], grown[1])


def test_add_reaches_each_slot_of_a_step() -> None:
    penalties = Penalties(VOCAB, 3, CPU)
    for slot in range(3):
        penalties.start(slot, *arrays([(0, False)]))
    penalties.add(slots(2, 0), torch.tensor([5, 7]))
    counts = penalties.counts(slots(0, 1, 2)).numpy()
    assert counts[:, SAMPLED].sum(1).tolist() == [1, 0, 1]
    assert counts[0, :, 7].tolist() == [1, 1]
    assert counts[2, :, 5].tolist() == [1, 1]


@settings(max_examples=50, deadline=None)
@given(HISTORY, st.integers(0, 20), st.integers(1, 8))
def test_counts_along_a_sequence_see_each_positions_own_past(history: list, first: int, rows: int) -> None:
    penalties = Penalties(VOCAB, 1, CPU)
    penalties.start(0, *arrays(history))
    penalties.add(slots(0), torch.tensor([3]))  # sampled since: not part of the sequence that is scored
    along = penalties.counts_along(0, first, rows).numpy()
    for row in range(rows):
        np.testing.assert_array_equal(along[row], count(history[: first + row]))


def test_only_slots_that_ask_have_rows_and_a_dropped_row_is_used_again() -> None:
    rows = SlotRows((VOCAB,), torch.float32, 8, CPU)
    assert rows.table.shape == (0, VOCAB)
    for slot in (6, 2, 4):
        rows.take(slot).fill_(slot)
    assert rows.table[rows.rows(slots(2, 4, 6)), 0].tolist() == [2, 4, 6]
    size = len(rows.table)
    rows.drop(2)
    rows.drop(2)
    rows.take(7).fill_(7)
    rows.take(7)
    assert len(rows.table) == size <= 4
    assert rows.table[rows.rows(slots(4, 6, 7)), 0].tolist() == [4, 6, 7]
    for slot in range(8):
        rows.take(slot)
    assert sorted(rows.rows(np.arange(8, dtype=np.int32)).tolist()) == list(range(8))
    assert len(rows.table) == 8
