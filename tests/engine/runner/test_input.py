"""The packed input of a step equals one built naively, row by row and token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.memory import Memory
from engine.runner.input import PrefillRow, StepBuffer, StepInput
from engine.step import StepPlan
from tests.engine.plans import Row, plan, start

ROWS, TOKENS, BLOCKS = 6, 120, 200


def buffer(device: str = "cpu") -> StepBuffer:
    return StepBuffer(ROWS, TOKENS, BLOCKS, Memory(torch.device(device)))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    slots = draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]
    decodes = draw(st.integers(0, len(slots)))
    rows = []
    for i, slot in enumerate(slots):
        context = draw(st.integers(1 if i < decodes else 0, 300))
        count = 1 if i < decodes else draw(st.integers(1, 20))
        blocks = draw(st.lists(st.integers(1, 99), min_size=-(-(context + count) // 16), max_size=30))
        ids = None if i < decodes else draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        scored = i >= decodes and draw(st.booleans())
        rows.append(Row(slot, context, blocks, ids, draw(st.booleans()), [7] * count if scored else None))
    return plan(*rows, starts=[start(slots[0])])


def naive(asked: StepPlan) -> dict[str, Any]:
    """What `StepInput` documents, by loops."""
    found: dict[str, Any] = {name: [] for name in ("positions", "write_slots", "sample_tokens", "sample_slots")}
    found |= {"chunks": [], "scores": [], "sample_positions": []}
    token = 0
    for row in range(asked.num_rows):
        context, count = int(asked.context_lens[row]), int(asked.query_lens[row])
        first = int(asked.block_indptr[row])
        for position in range(context, context + count):
            found["positions"].append(position)
            found["write_slots"].append(int(asked.block_ids[first + position // 16]) * 16 + position % 16)
        if row >= asked.num_decode:
            found["chunks"].append(PrefillRow(token, count, context, first))
        for score in asked.scores:
            if score.row == row:
                found["scores"].append((token, int(asked.slots[row]), context, score.targets.tolist()))
        if asked.samples[row]:
            found["sample_tokens"].append(token + count - 1)
            found["sample_slots"].append(int(asked.slots[row]))
            found["sample_positions"].append(context + count)
        token += count
    found["kv_lens"] = (asked.context_lens + asked.query_lens).tolist()
    return found


def check(step: StepInput, asked: StepPlan) -> None:
    expected = naive(asked)
    for name in ("positions", "write_slots", "kv_lens", "sample_tokens", "sample_slots"):
        assert getattr(step, name).tolist() == expected[name], name
    for name in ("token_ids", "slots", "block_indptr", "block_ids"):
        assert getattr(step, name).tolist() == getattr(asked, name).tolist(), name
    assert list(step.chunks) == expected["chunks"]
    assert [(s.start, s.slot, s.position, s.targets.tolist()) for s in step.scores] == expected["scores"]
    assert step.host_sample_slots.tolist() == expected["sample_slots"]
    assert step.host_sample_positions.tolist() == expected["sample_positions"]
    assert step.num_samples == len(expected["sample_slots"])
    decodes = expected["kv_lens"][: asked.num_decode]
    assert (step.shortest_decode, step.longest_decode) == (min(decodes, default=0), max(decodes, default=0))
    assert (step.num_decode, step.num_tokens) == (asked.num_decode, len(expected["positions"]))
    assert step.starts is asked.starts
    for name in ("kv_lens", "block_indptr", "block_ids"):
        assert getattr(step, name).dtype == torch.int32
    for name in ("positions", "write_slots", "slots", "token_ids", "sample_tokens", "sample_slots"):
        assert getattr(step, name).dtype == torch.int64


@given(st.lists(plans(), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_packed_equals_naive(asked: list[StepPlan]) -> None:
    """One buffer again and again, so that what a longer plan left behind does not show."""
    once = buffer()
    for one in asked:
        check(once.pack(one), one)


def test_the_arrays_are_views_of_one_buffer_and_do_not_overlap() -> None:
    once = buffer()
    asked = plan(Row(1, 5, [3]), Row(0, 30, [4, 5, 6], [1, 2, 3]))
    step = once.pack(asked)
    tensors = [value for name in StepInput.__slots__ if isinstance(value := getattr(step, name), torch.Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    again = once.pack(plan(Row(2, 7, [9])))
    assert step.slots.untyped_storage().data_ptr() == again.slots.untyped_storage().data_ptr()


def test_the_largest_step_fits_and_a_larger_one_is_refused() -> None:
    blocks = list(range(1, BLOCKS // ROWS + 1))
    rows = [Row(slot, 16, blocks, [1] * (TOKENS // ROWS)) for slot in range(ROWS)]
    check(buffer().pack(plan(*rows)), plan(*rows))
    with pytest.raises(ValueError, match="too large"):
        buffer().pack(plan(Row(0, 0, list(range(1, 500)), [1] * 7000)))


def test_on_another_device_one_copy_brings_all_of_it() -> None:
    step = buffer("meta").pack(plan(Row(1, 5, [3]), Row(0, 30, [4, 5, 6], [1, 2, 3])))
    assert step.positions.device.type == step.block_ids.device.type == "meta"
    assert (step.positions.shape, step.block_ids.shape) == ((4,), (4,))
    np.testing.assert_array_equal(step.host_sample_slots, [1, 0])
