"""One row per running request, as a struct of arrays: what every step reads and writes for all rows at once.

For a request with prompt length P, position p holds its p-th id; KV of position p is written by the step that has id
p as a query, and the token sampled there becomes id p + 1.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_SIZE, EngineConfig
from engine.request import FloatArray, IntArray
from engine.sequence import Sequence

Int64Array = npt.NDArray[np.int64]


class SlotTable:
    """Arrays over slots; an empty slot has `stint` 0 and all counts 0.

    stint: number of this stay in a slot, never repeated: tells a row of a launched step from a later tenant.
    computed: positions whose KV was written by launched steps. known: ids known on the host.
    prompt_len, prefill_len: P, and the ids known at admission (more than P after a preemption).
    last_position: positions whose KV will be needed at most (`Sequence.last_position`).
    num_blocks: blocks held, blocks[slot, :num_blocks]. hashed: leading blocks offered to the prefix cache.
    last_step: the last launched step that has the row.
    has_strings, has_top: rows that `finish` must look at one by one.
    ids, logprobs: every known id by position; logprobs (LOGPROB_MODES first) by sampled index. Their pages are
        touched only as far as rows grow.
    """

    def __init__(self, config: EngineConfig) -> None:
        slots, context = config.max_running, config.max_context
        self.sequences: list[Sequence | None] = [None] * slots
        self.stint = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int32)
        self.known = np.zeros(slots, np.int32)
        self.prompt_len = np.zeros(slots, np.int32)
        self.prefill_len = np.zeros(slots, np.int32)
        self.last_position = np.zeros(slots, np.int32)
        self.num_blocks = np.zeros(slots, np.int32)
        self.hashed = np.zeros(slots, np.int32)
        self.last_step = np.zeros(slots, np.int64)
        self.has_strings = np.zeros(slots, np.bool_)
        self.has_top = np.zeros(slots, np.bool_)
        self.blocks = np.zeros((slots, config.max_blocks_per_request), np.int32)
        self.ids = np.empty((slots, context), np.int32)
        self.logprobs = np.empty((3, slots, context), np.float32)
        self._free = list(range(slots))
        self._stints = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def enter(self, sequence: Sequence, blocks: list[int], num_cached: int) -> None:
        """Give the lowest free slot to `sequence`; the first `num_cached` of its blocks hold KV already."""
        slot = heapq.heappop(self._free)
        sequence.slot = slot
        length = len(sequence.ids)
        sampled = length - sequence.prompt_len
        self._stints += 1
        self.sequences[slot] = sequence
        self.stint[slot] = self._stints
        self.computed[slot] = num_cached * BLOCK_SIZE
        self.known[slot] = self.prefill_len[slot] = length
        self.prompt_len[slot] = sequence.prompt_len
        self.last_position[slot] = sequence.last_position
        self.num_blocks[slot] = len(blocks)
        self.hashed[slot] = num_cached
        self.blocks[slot, : len(blocks)] = blocks
        self.has_strings[slot] = sequence.matcher is not None
        self.has_top[slot] = sequence.request.top_logprobs > 0
        self.ids[slot, :length] = sequence.ids
        self.logprobs[:, slot, :sampled] = sequence.logprobs

    def leave(self, sequence: Sequence) -> list[int]:
        """Take a sequence's ids and logprobs out of its slot, empty the slot, and give back its blocks."""
        slot = sequence.slot
        assert slot is not None
        known = int(self.known[slot])
        sequence.ids = self.ids[slot, :known].copy()
        sequence.logprobs = self.logprobs[:, slot, : known - sequence.prompt_len].copy()
        sequence.slot = None
        blocks: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        self.sequences[slot] = None
        self.stint[slot] = 0
        self.has_strings[slot] = self.has_top[slot] = False
        for counts in (self.computed, self.known, self.prompt_len, self.prefill_len, self.last_position):
            counts[slot] = 0
        self.num_blocks[slot] = self.hashed[slot] = 0
        heapq.heappush(self._free, slot)
        return blocks

    def decoding(self) -> IntArray:
        """int32[n]: slots with one more token to compute, in slot order. A row whose budget is launched has none."""
        ready = (self.computed >= self.prefill_len) & (self.computed < self.last_position)
        return np.flatnonzero(ready).astype(np.int32)

    def short_of_block(self, slots: IntArray) -> IntArray:
        """Those of `slots` whose next position lies past their last block."""
        return slots[self.computed[slots] >= self.num_blocks[slots] * BLOCK_SIZE]

    def append_blocks(self, slots: IntArray, blocks: list[int]) -> None:
        """One more block for each of `slots`."""
        self.blocks[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1

    def gather_blocks(self, slots: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """(indptr int32[n + 1], ids int32[indptr[-1]]): the blocks that cover `lengths` positions of each slot."""
        counts = (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        indptr = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        width = self.blocks.shape[1]
        index = np.repeat(slots.astype(np.int64) * width - indptr[:-1], counts)
        index += np.arange(len(index))
        return indptr, self.blocks.ravel().take(index)

    def record(self, slots: IntArray, positions: IntArray, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Ids sampled for `positions` of `slots`, with their float32[3, n] logprobs."""
        self.ids[slots, positions] = token_ids
        self.logprobs[:, slots, positions - self.prompt_len[slots]] = logprobs
        self.known[slots] = positions + 1
