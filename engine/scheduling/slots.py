"""One row per running request, as a struct of arrays: what every step reads and writes for all rows at once.

For a request with prompt length P, position p holds its p-th id; KV of position p is written by the step that has id
p as a query, and the token sampled there becomes id p + 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from engine.config import BLOCK_SIZE, EngineConfig
from engine.request import BoolArray, FloatArray, Int64Array, IntArray
from engine.scheduling.sequence import Sequence


class SlotTable:
    """Arrays over slots; an empty slot has `stint` 0 and all counts 0.

    stint: number of this stay in a slot, never repeated: tells a row of a launched step from a later tenant.
    computed: positions whose KV was written by launched steps. known: ids known on the host.
    prefill_len: ids known at admission (more than P after a preemption).
    last_position: positions whose KV will be needed at most (`Sequence.last_position`).
    num_blocks: blocks held, blocks[slot, :num_blocks]. hashed: leading blocks offered to the prefix cache.
    last_step: the last launched step that has the row.
    ids, logprobs: every known id, and those of sampled ones in the order of LOGPROB_MODES, by slot and position. Their
        pages are touched only as far as rows grow.
    with_top: running sequences that want alternatives, by slot.
    """

    def __init__(self, config: EngineConfig) -> None:
        slots, row_blocks = config.max_running, config.max_blocks_per_request
        context = row_blocks * BLOCK_SIZE
        self.sequences: list[Sequence | None] = [None] * slots
        self.with_top: dict[int, Sequence] = {}
        self.stint = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.prefill_len = np.zeros(slots, np.int64)
        self.last_position = np.zeros(slots, np.int64)
        self.num_blocks = np.zeros(slots, np.int64)
        self.hashed = np.zeros(slots, np.int64)
        self.last_step = np.zeros(slots, np.int64)
        self.blocks = np.zeros((slots, row_blocks), np.int32)
        self.ids = np.empty((slots, context), np.int32)
        self.logprobs = np.empty((slots, context, 3), np.float32)
        self._flat_blocks = self.blocks.reshape(-1)
        self._flat_ids = self.ids.reshape(-1)
        self._flat_logprobs = self.logprobs.reshape(-1, 3)
        self._ids_of_block = self._flat_ids.view(f"V{BLOCK_SIZE * self.ids.itemsize}")
        self._first_block = np.arange(slots) * row_blocks
        self._first_id = np.arange(slots) * context
        self._counting = np.arange(1024)
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
        self.last_position[slot] = sequence.last_position
        self.num_blocks[slot] = len(blocks)
        self.hashed[slot] = num_cached
        self.blocks[slot, : len(blocks)] = blocks
        self.ids[slot, :length] = sequence.ids
        self.logprobs[slot, sequence.prompt_len : length] = sequence.logprobs.T

    def leave(self, sequence: Sequence) -> list[int]:
        """Take a sequence's ids and logprobs out of its slot, empty the slot, and give back its blocks."""
        slot = sequence.slot
        assert slot is not None
        known = int(self.known[slot])
        sequence.ids = self.ids[slot, :known].copy()
        sequence.logprobs = self.logprobs[slot, sequence.prompt_len : known].T.copy()
        sequence.slot = None
        blocks: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        self.sequences[slot] = None
        self.with_top.pop(slot, None)
        self.stint[slot] = 0
        for counts in (self.computed, self.known, self.prefill_len, self.last_position):
            counts[slot] = 0
        self.num_blocks[slot] = self.hashed[slot] = 0
        heapq.heappush(self._free, slot)
        return blocks

    def decoding(self) -> BoolArray:
        """bool[slots]: one more token to compute. A row whose budget is launched has none."""
        return (self.computed >= self.prefill_len) & (self.computed < self.last_position)

    def short_of_block(self, rows: BoolArray) -> Int64Array:
        """int64[n]: those of `rows` whose next position lies past their last block."""
        short: Int64Array = (rows & (self.computed >= self.num_blocks * BLOCK_SIZE)).nonzero()[0]
        return short

    def append_blocks(self, slots: Int64Array, blocks: list[int]) -> None:
        """One more block for each of `slots`."""
        counts = self.num_blocks[slots]
        self._flat_blocks[self._first_block[slots] + counts] = blocks
        self.num_blocks[slots] = counts + 1

    def gather_blocks(self, slots: Int64Array, lengths: Int64Array) -> tuple[IntArray, IntArray]:
        """(indptr int32[n + 1], ids int32[indptr[-1]]): the blocks that cover `lengths` positions of each slot."""
        counts = (lengths + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        indptr = np.zeros(len(slots) + 1, np.int32)
        ends = counts.cumsum()
        indptr[1:] = ends
        # No index is out of range; "clip" only spares numpy's check, which takes longer than the rest.
        return indptr, self._flat_blocks.take(self._runs(self._first_block[slots], counts, ends), mode="clip")

    def take_unhashed(self, slots: Int64Array, computed: Int64Array) -> Iterator[tuple[int, int, int, bytes]]:
        """(slot, number, block, ids as bytes) of every block that `computed` positions fill; each comes once."""
        full, hashed = computed // BLOCK_SIZE, self.hashed[slots]
        grown = (full > hashed).nonzero()[0]
        slots, hashed, full = slots[grown], hashed[grown], full[grown]
        self.hashed[slots] = full
        counts = full - hashed
        owners = slots.repeat(counts)
        index = self._runs(self._first_block[slots] + hashed, counts, counts.cumsum())
        numbers = index - self._first_block[owners]
        blocks, ids = self._flat_blocks[index], self._ids_of_block[index]
        return zip(owners.tolist(), numbers.tolist(), blocks.tolist(), ids.tolist(), strict=True)

    def _runs(self, firsts: Int64Array, counts: Int64Array, ends: Int64Array) -> Int64Array:
        """int64[ends[-1]]: of each run `counts[i]` numbers from `firsts[i]` on. ends: the sums of `counts` so far."""
        numbers: Int64Array = (firsts - ends + counts).repeat(counts)
        if len(numbers) > len(self._counting):
            self._counting = np.arange(2 * len(numbers))
        numbers += self._counting[: len(numbers)]
        return numbers

    def record(self, slots: Int64Array, positions: Int64Array, token_ids: IntArray, logprobs: FloatArray) -> None:
        """Ids sampled for `positions` of `slots`, with their float32[3, n] logprobs."""
        index = self._first_id[slots] + positions
        self._flat_ids[index] = token_ids
        self._flat_logprobs[index] = logprobs.T
        self.known[slots] = positions + 1
