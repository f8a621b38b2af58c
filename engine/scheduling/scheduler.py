"""Policy: which rows the next step has. Decode rows first, then prefill chunks in one token budget.

Waiting requests are ordered by the start of their trajectory, then by arrival. A request is admitted when a slot and
blocks for all its known ids are free, with one block to spare for every running row. A running row that finds no
block takes those held for a trajectory between turns (kv_holds.py); where there are none, the newest running
trajectory is preempted: it gives everything back and waits again, by its order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from engine.config import BLOCK_SIZE, EngineConfig
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.kv_holds import KvHolds
from engine.scheduling.scheduled import Chunk, Scheduled, schedule
from engine.scheduling.sequence import Sequence
from engine.scheduling.slots import SlotTable


class OutOfBlocks(Exception):
    """The running rows need more blocks than are free; nothing was changed."""


class Scheduler:
    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        """num_blocks counts the dummy block 0."""
        self.pool = BlockPool(num_blocks)
        self.holds = KvHolds(self.pool)
        self.table = SlotTable(config)
        self.epoch = 0
        self.admit_new = True
        self._config = config
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._leaders: dict[str, Sequence] = {}
        self._held: dict[str, list[Sequence]] = {}
        self._deferred: deque[tuple[int, list[int]]] = deque()
        self._done_step = -1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + sum(map(len, self._held.values()))

    @property
    def has_work(self) -> bool:
        """Could `plan` give a step, now or once launched steps are finished?"""
        if self.table.num_running:
            return True
        return bool(self._waiting) and (self.admit_new or any(s.started for s in self._waiting))

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, sequence, key=_key)
        self.holds.returned(sequence)

    def remove(self, sequence: Sequence, *, trusted: bool = True, goes_on: bool = False) -> None:
        """Forget a sequence wherever it is. trusted: its KV may be hit by others. goes_on: its trajectory may."""
        if sequence.slot is not None:
            self._vacate(sequence, trusted=trusted, hold=goes_on and sequence.request.goes_on)
            return
        if not self._remove_from(self._waiting, sequence):
            self._remove_from(self._held[sequence.request.group], sequence)
        self.holds.gone_again(sequence.request.trajectory)

    def begin_epoch(self) -> None:
        """New weights serve: nothing published before is hit again, and nothing computed before is published."""
        self.epoch += 1
        self.holds.clear()
        for leader in list(self._leaders.values()):
            self._stop_leading(leader)

    def drop_hold(self) -> bool:
        """Give up the KV of the trajectory between turns that is the least loss. False: none is held."""
        victims = self.holds.victims()
        if victims:
            self.holds.drop(victims[0])
        return bool(victims)

    def newest_running(self) -> Sequence:
        return max(self.table.running(), key=_key)

    def preempt(self, sequence: Sequence) -> None:
        """Take everything back from a running sequence; it waits again, by its order, with what it sampled."""
        self._vacate(sequence, trusted=True, hold=False)
        sequence.preempted()
        self.add(sequence)

    def plan(self, step: int) -> Scheduled | None:
        """The next step, or None when no row can run. Raises OutOfBlocks before anything is changed."""
        decode = self.table.decoding()
        short = self.table.short_of_block(decode)
        if len(short) > self.pool.num_free:
            raise OutOfBlocks
        self.table.append_blocks(short, self.pool.allocate(len(short)))
        budget = self._config.max_step_tokens - len(decode)
        chunks = []
        for sequence in self._prefilling:
            if budget == 0:
                break
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].size
        admitted = []
        while budget > 0 and (started := self._admit(step)) is not None:
            admitted.append(started)
            chunks.append(self._chunk(started, budget))
            budget -= chunks[-1].size
        if not chunks and not len(decode):
            return None
        for chunk in chunks:
            if chunk.last:
                self._remove_from(self._prefilling, chunk.sequence)
        return schedule(self.table, step, decode, tuple(admitted), tuple(chunks))

    def step_done(self, step: int) -> None:
        """Launched steps up to `step` no longer touch any block."""
        self._done_step = step
        while self._deferred and self._deferred[0][0] <= step:
            self.pool.release(self._deferred.popleft()[1])

    def chunk_done(self, chunk: Chunk) -> None:
        """It was computed and read back: offer its whole blocks to the prefix cache.

        After the last one siblings that waited for them may go.
        """
        self._publish(chunk.sequence, self.table.blocks_of(chunk.slot), chunk.start, chunk.start + chunk.size)
        if chunk.last:
            self._stop_leading(chunk.sequence)

    def _admit(self, step: int) -> Sequence | None:
        """Give a slot and blocks to the first waiting sequence that may start; None when it does not fit."""
        at = 0
        while self.table.num_free and at < len(self._waiting):
            sequence = self._waiting[at]
            if not self.admit_new and not sequence.started:
                at += 1
                continue
            hits = self._hits(sequence)
            if self._gains_by_waiting(sequence, len(hits)):
                insort(self._held.setdefault(sequence.request.group, []), self._waiting.pop(at), key=_key)
                continue
            fresh = -(-len(sequence.ids) // BLOCK_SIZE) - len(hits)
            if not self._make_room(sequence, hits, fresh):
                return None
            del self._waiting[at]
            self.pool.acquire(hits)
            self.holds.end(sequence.request.trajectory)
            self.table.enter(sequence, hits + self.pool.allocate(fresh), len(hits), step)
            sequence.epoch = self.epoch
            if sequence.cached_tokens is None:
                sequence.cached_tokens = len(hits) * BLOCK_SIZE
            insort(self._prefilling, sequence, key=_key)
            if sequence.request.group and self._config.prefix_cache:
                self._leaders.setdefault(sequence.request.group, sequence)
            return sequence
        return None

    def _make_room(self, sequence: Sequence, hits: list[int], fresh: int) -> bool:
        """Can it have `fresh` blocks besides `hits`? Holds that it may take are dropped as far as that helps."""
        pool, running = self.pool, self.table.num_running
        lacking = fresh + running + pool.num_unheld(hits) - pool.num_free
        if lacking <= 0 or not len(self.holds):
            return lacking <= 0
        # What ended while a step was in flight is free after it: nobody has to lose anything for so short a wait.
        if lacking <= sum(len(blocks) for _, blocks in self._deferred):
            return False
        victims = self.holds.victims_of(sequence, idle=running == 0)
        if running and sum(hold.own for hold in victims) < lacking:
            return False
        for hold in victims:
            self.holds.drop(hold)
            if fresh + running + pool.num_unheld(hits) <= pool.num_free:
                return True
        return False

    def _publish(self, sequence: Sequence, blocks: list[int], start: int, end: int) -> None:
        """Offer a sequence's whole blocks that end among its positions [start, end) to the prefix cache."""
        if self._config.prefix_cache and sequence.epoch == self.epoch:
            first, stop = start // BLOCK_SIZE, end // BLOCK_SIZE
            self.pool.publish(blocks[first:stop], sequence.prefix_keys(stop, self.epoch)[first:])

    def _hits(self, sequence: Sequence) -> list[int]:
        """Blocks of its longest cached prefix; the last id is always computed anew."""
        if not self._config.prefix_cache:
            return []
        whole = 0 if sequence.to_score else (len(sequence.ids) - 1) // BLOCK_SIZE
        return self.pool.find(sequence.prefix_keys(whole, self.epoch))

    def _gains_by_waiting(self, sequence: Sequence, num_hits: int) -> bool:
        """Is the first block that it misses one that a sibling is about to publish?"""
        leader = self._leaders.get(sequence.request.group)
        if leader is None or leader.epoch != self.epoch or sequence.to_score:
            return False
        shared = min((len(sequence.ids) - 1) // BLOCK_SIZE, len(leader.ids) // BLOCK_SIZE)
        if num_hits >= shared:
            return False
        mine, theirs = (s.prefix_keys(num_hits + 1, self.epoch) for s in (sequence, leader))
        return mine[-1] == theirs[-1]

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        slot = sequence.slot
        assert slot is not None
        start = int(self.table.computed[slot])
        size = min(len(sequence.ids) - start, budget)
        return Chunk(sequence, slot, start, size, start + size == len(sequence.ids))

    def _vacate(self, sequence: Sequence, *, trusted: bool, hold: bool) -> None:
        """Empty its slot; its blocks are free once the last step that has its row is done.

        Blocks of what it sampled are published only now: nobody can ask for ids that he was not told. The last id has
        no KV. hold: keep for its next turn what that can hit.
        """
        last_step, num_admitted = int(self.table.last_step[sequence.slot]), len(sequence.ids)
        blocks = self.table.leave(sequence)
        if not trusted:
            self.pool.withdraw(blocks)
        elif len(sequence.ids) > num_admitted:
            self._publish(sequence, blocks, 0, len(sequence.ids) - 1)
        if hold and sequence.epoch == self.epoch and (hits := self._hits(sequence)):
            self.holds.begin(sequence, hits)
        if last_step > self._done_step:
            self._deferred.append((last_step, blocks))
        else:
            self.pool.release(blocks)
        self._remove_from(self._prefilling, sequence)
        self._stop_leading(sequence)

    def _stop_leading(self, sequence: Sequence) -> None:
        group = sequence.request.group
        if self._leaders.get(group) is sequence:
            del self._leaders[group]
            for sibling in self._held.pop(group, ()):
                self.add(sibling)

    @staticmethod
    def _remove_from(ordered: list[Sequence], sequence: Sequence) -> bool:
        at = bisect_left(ordered, sequence.key, key=_key)
        found = at < len(ordered) and ordered[at] is sequence
        if found:
            del ordered[at]
        return found


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
