"""A `StepPlan` packed for the device: one buffer, one copy, every array of the step a view into it.

A step's buffer is written again only after its result was waited for, so the host may run ahead of the device
without either reading what the other writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.config import BLOCK_SIZE
from engine.memory.memory import Memory
from engine.request import Int64Array, IntArray
from engine.step import SlotStart, StepPlan

_ALIGNMENT = 16
"""Bytes; each array of a packed step starts at a multiple of this."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Its queries are [start, start + length) of the step's tokens and follow `context` cached
    tokens; its KV blocks begin at `first_block` of `block_ids`."""

    start: int
    length: int
    context: int
    first_block: int


@dataclass(frozen=True, slots=True)
class Score:
    """Prompt-logprob work: the step's tokens [start, start + len(targets)) of one slot, at absolute positions from
    `position` on, are each followed by a target (int32, -1 for none)."""

    start: int
    slot: int
    position: int
    targets: IntArray


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, ready to run. R rows, T tokens, decode rows first; S rows sample.

    On the host: counts; shortest_decode and longest_decode, of kv_lens over the decode rows; chunks and scores in row
    order; host_sample_slots int32[S]; host_sample_positions int32[S], absolute, of the token to be sampled.
    On the device: token_ids int64[T - num_decode], of the prefill rows; positions int64[T]; write_slots int64[T],
    block * 16 + offset of each token's KV; slots int64[R]; kv_lens int32[R], queries included; block_indptr
    int32[R + 1] and block_ids int32[N]; sample_tokens int64[S], index of a sampling row's last query among the T
    tokens; sample_slots int64[S].
    """

    num_decode: int
    num_tokens: int
    shortest_decode: int
    longest_decode: int
    chunks: tuple[PrefillRow, ...]
    scores: tuple[Score, ...]
    starts: tuple[SlotStart, ...]
    host_sample_slots: IntArray
    host_sample_positions: IntArray
    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    block_indptr: torch.Tensor
    block_ids: torch.Tensor
    sample_tokens: torch.Tensor
    sample_slots: torch.Tensor

    @property
    def num_samples(self) -> int:
        return len(self.host_sample_slots)


def token_places(plan: StepPlan) -> tuple[Int64Array, Int64Array, Int64Array]:
    """begins int64[R], each row's first query among the step's T tokens; positions int64[T], absolute; write_slots
    int64[T], block * 16 + offset of each token's KV."""
    begins = np.cumsum(plan.query_lens, dtype=np.int64) - plan.query_lens
    row = np.repeat(np.arange(plan.num_rows), plan.query_lens)
    positions = np.arange(plan.num_tokens) + (plan.context_lens - begins)[row]
    blocks = plan.block_ids[plan.block_indptr[row] + positions // BLOCK_SIZE].astype(np.int64)
    return begins, positions, blocks * BLOCK_SIZE + positions % BLOCK_SIZE


def prompt_scores(plan: StepPlan) -> tuple[Score, ...]:
    """The plan's prompt-logprob work, in row order."""
    if not plan.scores:
        return ()
    begins = np.cumsum(plan.query_lens) - plan.query_lens
    return tuple(
        Score(int(begins[score.row]), int(plan.slots[score.row]), int(plan.context_lens[score.row]), score.targets)
        for score in plan.scores
    )


class StepBuffer:
    """Memory for one step's input: `host` is written, then copied to `device` (the same memory on the CPU)."""

    def __init__(self, max_rows: int, max_tokens: int, max_blocks: int, memory: Memory) -> None:
        """max_blocks: entries of a step's block table, max_rows times the blocks of the longest request."""
        words = 3 * max_tokens + 3 * max_rows
        halves = 2 * max_rows + 1 + max_blocks
        capacity = 8 * words + 4 * halves + 9 * _ALIGNMENT
        capacity += -capacity % 8
        host = memory.allocate(capacity, "step input", host=True)
        device = host if memory.device.type == "cpu" else memory.allocate(capacity, "step input")
        self._host, self._device = host, device
        self._host64, self._device64 = host.view(torch.int64).numpy(), device.view(torch.int64)
        self._host32, self._device32 = host.view(torch.int32).numpy(), device.view(torch.int32)

    def pack(self, plan: StepPlan) -> StepInput:
        """Write a plan into the buffer. The result reads this memory until the buffer is packed again."""
        decodes = plan.num_decode
        begins, positions, write_slots = token_places(plan)
        kv_lens = plan.context_lens + plan.query_lens
        sampling = np.flatnonzero(plan.samples)
        views, end = self._write(
            0,
            self._host64,
            self._device64,
            token_ids=plan.token_ids,
            positions=positions,
            write_slots=write_slots,
            slots=plan.slots,
            sample_tokens=(begins + plan.query_lens)[sampling] - 1,
            sample_slots=plan.slots[sampling],
        )
        narrow, end = self._write(
            end,
            self._host32,
            self._device32,
            kv_lens=kv_lens,
            block_indptr=plan.block_indptr,
            block_ids=plan.block_ids,
        )
        if self._device is not self._host:
            self._device[:end].copy_(self._host[:end], non_blocking=True)
        return StepInput(
            num_decode=decodes,
            num_tokens=plan.num_tokens,
            shortest_decode=int(kv_lens[:decodes].min()) if decodes else 0,
            longest_decode=int(kv_lens[:decodes].max()) if decodes else 0,
            chunks=tuple(
                PrefillRow(
                    int(begins[r]), int(plan.query_lens[r]), int(plan.context_lens[r]), int(plan.block_indptr[r])
                )
                for r in range(decodes, plan.num_rows)
            ),
            scores=prompt_scores(plan),
            starts=plan.starts,
            host_sample_slots=plan.slots[sampling],
            host_sample_positions=kv_lens[sampling].astype(np.int32),
            **views,
            **narrow,
        )

    def _write(
        self, end: int, host: npt.NDArray[np.integer], device: torch.Tensor, **arrays: npt.NDArray[np.integer]
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Lay arrays of one dtype one after the other from byte `end` on; the device's views of them, and their end."""
        size, views = host.itemsize, {}
        at = end // size
        for name, array in arrays.items():
            stop = at + len(array)
            if stop > len(host):
                raise ValueError(f"the plan is too large for its buffer: {name} ends at {stop} of {len(host)}")
            host[at:stop] = array
            views[name] = device.narrow(0, at, len(array))
            at = stop + -stop % (_ALIGNMENT // size)
        return views, at * size
