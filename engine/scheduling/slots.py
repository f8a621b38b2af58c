"""One row per running request, as a struct of arrays: what every step reads and writes for all rows at once.

For a request with prompt length P, position p holds its p-th id; KV of position p is written by the step that has id
p as a query, and the token sampled there becomes id p + 1.
"""

from __future__ import annotations

import heapq
from array import array
from sys import byteorder

import numpy as np

from engine.config import BLOCK_SIZE, EngineConfig
from engine.request import LOGPROB_MODES, FloatArray, Int64Array, IntArray
from engine.scheduling.sequence import Sequence

NEVER = np.iinfo(np.int64).max
SAMPLED = np.dtype([("id", np.int32), ("logprobs", np.float32, len(LOGPROB_MODES))])


class SlotTable:
    """Arrays over slots; an empty slot has `first_step` NEVER and all counts 0.

    first_step: the first step that has this tenant: tells its rows from those of an earlier one.
    last_step: the last launched step that has the row.
    computed: positions whose KV was written by launched steps. known: ids known on the host.
    last_position: positions whose KV will be needed at most (`Sequence.last_position`), 0 while prompt ids are left.
    blocks: ids of the blocks held, in order, as int32 bytes: what a step needs of many rows is one join.
    sampled: SAMPLED by slot and position, of ids sampled since the tenant came. Pages are touched as rows grow.
    with_top: running sequences that want alternatives, by slot.
    """

    def __init__(self, config: EngineConfig) -> None:
        slots, context = config.max_running, config.max_blocks_per_request * BLOCK_SIZE
        self.sequences: list[Sequence | None] = [None] * slots
        self.with_top: dict[int, Sequence] = {}
        self.first_step = np.full(slots, NEVER)
        self.last_step = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.last_position = np.zeros(slots, np.int64)
        self.blocks = np.full(slots, b"", np.object_)
        self.sampled = np.empty((slots, context), SAMPLED)
        self._flat_sampled = self.sampled.reshape(-1)
        self._first_place = np.arange(slots) * context
        self._free = list(range(slots))

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

    def enter(self, sequence: Sequence, blocks: list[int], num_cached: int, step: int) -> None:
        """Give the lowest free slot to `sequence` from `step` on; the first `num_cached` of its blocks hold KV."""
        slot = heapq.heappop(self._free)
        sequence.slot = slot
        self.sequences[slot] = sequence
        if sequence.request.top_logprobs:
            self.with_top[slot] = sequence
        self.first_step[slot] = step
        self.computed[slot] = num_cached * BLOCK_SIZE
        self.known[slot] = len(sequence.ids)
        self.blocks[slot] = array("i", blocks).tobytes()

    def leave(self, sequence: Sequence) -> list[int]:
        """Empty a sequence's slot: what was sampled there goes to the sequence, its blocks are given back."""
        slot = sequence.slot
        assert slot is not None
        blocks, sampled = self.blocks_of(slot), self.sampled[slot, len(sequence.ids) : self.known[slot]]
        sequence.ids = np.concatenate((sequence.ids, sampled["id"]))
        sequence.logprobs = np.concatenate((sequence.logprobs, sampled["logprobs"].T), axis=1)
        sequence.slot = self.sequences[slot] = None
        self.with_top.pop(slot, None)
        self.first_step[slot] = NEVER
        self.blocks[slot] = b""
        self.computed[slot] = self.known[slot] = self.last_position[slot] = 0
        heapq.heappush(self._free, slot)
        return blocks

    def blocks_of(self, slot: int) -> list[int]:
        blocks: list[int] = np.frombuffer(self.blocks[slot], np.int32).tolist()
        return blocks

    def decoding(self) -> Int64Array:
        """int64[n]: slots with one more token to compute, ascending. A row whose budget is launched has none."""
        return (self.computed < self.last_position).nonzero()[0]

    def short_of_block(self, slots: Int64Array) -> Int64Array:
        """int64[n]: those of decoding `slots` whose next position lies past their last block."""
        short: Int64Array = slots[self.computed[slots] & (BLOCK_SIZE - 1) == 0]
        return short

    def append_blocks(self, slots: Int64Array, blocks: list[int]) -> None:
        """One more block for each of `slots`."""
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self.blocks[slot] += block.to_bytes(4, byteorder)

    def gather_blocks(self, slots: Int64Array, lengths: IntArray, num_decode: int) -> tuple[IntArray, IntArray]:
        """(indptr int32[n + 1], ids int32[indptr[-1]]): blocks that cover `lengths` (int32) positions of each slot.

        The first `num_decode` hold no others; the rest have blocks for all their known ids from the first chunk on.
        """
        counts = (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        indptr = np.zeros(len(slots) + 1, np.int32)
        counts.cumsum(dtype=np.int32, out=indptr[1:])
        rows = self.blocks[slots].tolist()
        for row, count in enumerate(counts[num_decode:].tolist(), num_decode):
            rows[row] = rows[row][: count * indptr.itemsize]
        return indptr, np.frombuffer(b"".join(rows), np.int32)

    def record(self, slots: Int64Array, positions: Int64Array, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Ids sampled for `positions` of `slots`, with their float32[3, n] logprobs."""
        sampled = np.empty(len(slots), SAMPLED)
        sampled["id"] = token_ids
        sampled["logprobs"] = logprobs.T
        self._flat_sampled[self._first_place[slots] + positions] = sampled
        self.known[slots] = positions + 1
