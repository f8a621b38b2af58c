"""A step whose rows are decided, as arrays: the plan, and what is needed to read its results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.request import Int64Array, IntArray
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import SlotTable
from engine.step import ScoreChunk, SlotStart, StepPlan


class Chunk(NamedTuple):
    """A prefill row: `size` known ids of a sequence from position `start` on; `last`: up to its end."""

    sequence: Sequence
    slot: int
    start: int
    size: int
    last: bool

    @property
    def num_prompt(self) -> int:
        """How many of its ids are prompt ids (the rest was sampled before a preemption)."""
        return max(0, min(self.start + self.size, self.sequence.prompt_len) - self.start)


class Scheduled(NamedTuple):
    """A plan with what is needed to read its results.

    slots: int64[R], those of the plan. computed: int64[R], positions with KV after the step.
    """

    plan: StepPlan
    slots: Int64Array
    computed: Int64Array
    admitted: tuple[Sequence, ...]
    chunks: tuple[Chunk, ...]


def schedule(
    table: SlotTable, step: int, decode: Int64Array, admitted: tuple[Sequence, ...], chunks: tuple[Chunk, ...]
) -> Scheduled:
    """The plan of a step whose rows are decided; the table counts their positions as computed from here on.

    decode: int64[n], slots that decode one token.
    """
    slots, token_ids = decode, np.empty(0, np.int32)
    query_lens = np.ones(len(decode) + len(chunks), np.int32)
    samples = np.ones(len(query_lens), np.bool_)
    if chunks:
        slots = np.concatenate((decode, [c.slot for c in chunks]))
        query_lens[len(decode) :] = [c.size for c in chunks]
        samples[len(decode) :] = [c.last and c.sequence.budget > 0 for c in chunks]
        token_ids = np.concatenate([c.sequence.ids[c.start : c.start + c.size] for c in chunks])
    computed = table.computed[slots]
    context_lens = computed.astype(np.int32)
    computed += query_lens
    block_indptr, block_ids = table.gather_blocks(slots, context_lens + query_lens, len(decode))
    table.computed[slots] = computed
    table.last_step[slots] = step
    for chunk in chunks:
        if chunk.last:
            table.last_position[chunk.slot] = chunk.sequence.last_position
    plan = StepPlan(
        step=step,
        starts=tuple(map(_slot_start, admitted)),
        slots=slots.astype(np.int32),
        num_decode=len(decode),
        context_lens=context_lens,
        query_lens=query_lens,
        token_ids=token_ids,
        block_indptr=block_indptr,
        block_ids=block_ids,
        samples=samples,
        scores=tuple(
            ScoreChunk(row, _targets(chunk)) for row, chunk in enumerate(chunks, len(decode)) if chunk.sequence.to_score
        ),
    )
    return Scheduled(plan, slots, computed, admitted, chunks)


def _slot_start(sequence: Sequence) -> SlotStart:
    request, slot = sequence.request, sequence.slot
    assert slot is not None
    return SlotStart(
        slot, request.params, sequence.ids, sequence.sampled_mask(), request.logprob_modes, request.top_logprobs
    )


def _targets(chunk: Chunk) -> IntArray:
    """The prompt ids after each query of a chunk; -1 past the prompt's end."""
    prompt = chunk.sequence.request.token_ids
    following = prompt[chunk.start + 1 : chunk.start + chunk.size + 1]
    return np.concatenate((following, np.full(chunk.size - len(following), -1, np.int32)))
