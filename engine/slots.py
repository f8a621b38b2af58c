"""One row per running request, as a struct of arrays: what every step reads and writes for all rows at once.

For a request with prompt length P, position p holds its p-th id; KV of position p is written by the step that has id
p as a query, and the token sampled there becomes id p + 1.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_SIZE, EngineConfig
from engine.request import BoolArray, FloatArray, IntArray
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
    ids: every known id by position. logprobs: by sampled index, LOGPROB_MODES last, so that a step touches one cache
        line a row. Their pages are touched only as far as rows grow.
    with_top: running sequences that want alternatives, by slot.
    """

    def __init__(self, config: EngineConfig) -> None:
        slots, context = config.max_running, config.max_context
        self.sequences: list[Sequence | None] = [None] * slots
        self.with_top: dict[int, Sequence] = {}
        self.stint = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int32)
        self.known = np.zeros(slots, np.int32)
        self.prompt_len = np.zeros(slots, np.int32)
        self.prefill_len = np.zeros(slots, np.int32)
        self.last_position = np.zeros(slots, np.int32)
        self.num_blocks = np.zeros(slots, np.int32)
        self.hashed = np.zeros(slots, np.int32)
        self.last_step = np.zeros(slots, np.int64)
        self.blocks = np.zeros((slots, config.max_blocks_per_request), np.int32)
        self.ids = np.empty((slots, context), np.int32)
        self.logprobs = np.empty((slots, context, 3), np.float32)
        self._free = list(range(slots))
        self._stints = 0
        self._first_block = np.arange(slots) * self.blocks.shape[1]
        self._counting = np.arange(1024)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self._free)

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    def owner(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence

    def enter(self, sequence: Sequence, blocks: list[int], num_cached: int) -> None:
        """Give the lowest free slot to `sequence`; the first `num_cached` of its blocks hold KV already."""
        slot = heapq.heappop(self._free)
        sequence.slot = slot
        length = len(sequence.ids)
        self._stints += 1
        self.sequences[slot] = sequence
        if sequence.request.top_logprobs:
            self.with_top[slot] = sequence
        self.stint[slot] = self._stints
        self.computed[slot] = num_cached * BLOCK_SIZE
        self.known[slot] = self.prefill_len[slot] = length
        self.prompt_len[slot] = sequence.prompt_len
        self.last_position[slot] = sequence.last_position
        self.num_blocks[slot] = len(blocks)
        self.hashed[slot] = num_cached
        self.blocks[slot, : len(blocks)] = blocks
        self.ids[slot, :length] = sequence.ids
        self.logprobs[slot, : len(sequence.logprobs)] = sequence.logprobs

    def leave(self, sequence: Sequence) -> list[int]:
        """Take a sequence's ids and logprobs out of its slot, empty the slot, and give back its blocks."""
        slot = sequence.slot
        assert slot is not None
        known = int(self.known[slot])
        sequence.ids = self.ids[slot, :known].copy()
        sequence.logprobs = self.logprobs[slot, : known - sequence.prompt_len].copy()
        sequence.slot = None
        blocks: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        self.sequences[slot] = None
        self.with_top.pop(slot, None)
        self.stint[slot] = 0
        for counts in (self.computed, self.known, self.prompt_len, self.prefill_len, self.last_position):
            counts[slot] = 0
        self.num_blocks[slot] = self.hashed[slot] = 0
        heapq.heappush(self._free, slot)
        return blocks

    def decoding(self) -> BoolArray:
        """bool[slots]: one more token to compute. A row whose budget is launched has none."""
        return (self.computed >= self.prefill_len) & (self.computed < self.last_position)

    def short_of_block(self, rows: BoolArray) -> IntArray:
        """int32[n]: those of `rows` whose next position lies past their last block."""
        return slots_of(rows & (self.computed >= self.num_blocks * BLOCK_SIZE))

    def append_blocks(self, slots: IntArray, blocks: list[int]) -> None:
        """One more block for each of `slots`."""
        counts = self.num_blocks.take(slots)
        self.blocks[slots, counts] = blocks
        self.num_blocks[slots] = counts + 1

    def gather_blocks(self, slots: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """(indptr int32[n + 1], ids int32[indptr[-1]]): the blocks that cover `lengths` positions of each slot."""
        counts = (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        indptr = np.zeros(len(slots) + 1, np.int32)
        counts.cumsum(out=indptr[1:])
        index = (self._first_block.take(slots) - indptr[:-1]).repeat(counts)
        if len(index) > len(self._counting):
            self._counting = np.arange(2 * len(index))
        index += self._counting[: len(index)]
        # No index is out of range; "clip" only spares numpy's check, which takes longer than the rest.
        return indptr, self.blocks.ravel().take(index, mode="clip")

    def take_unhashed(self, slots: IntArray, computed: IntArray) -> list[tuple[int, int, int, bytes]]:
        """(slot, number, block, ids as bytes) of every block that `computed` positions fill; each comes once."""
        hashed, full = self.hashed.take(slots), computed // BLOCK_SIZE
        grown = np.flatnonzero(full > hashed)
        if not len(grown):
            return []
        slots, first, end = slots.take(grown), hashed.take(grown), full.take(grown)
        self.hashed[slots] = end
        counts = end - first
        slots = slots.repeat(counts)
        numbers = (first + counts - counts.cumsum()).repeat(counts) + np.arange(len(slots))
        ids = self.ids[slots[:, None], numbers[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)].tobytes()
        size = BLOCK_SIZE * self.ids.itemsize
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        return list(zip(slots.tolist(), numbers.tolist(), self.blocks[slots, numbers].tolist(), pieces, strict=True))

    def record(self, slots: IntArray, positions: IntArray, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Ids sampled for `positions` of `slots`, with their float32[3, n] logprobs."""
        self.ids[slots, positions] = token_ids
        self.logprobs[slots, positions - self.prompt_len.take(slots)] = logprobs.T
        self.known[slots] = positions + 1


def slots_of(rows: BoolArray) -> IntArray:
    return np.flatnonzero(rows).astype(np.int32)
