"""KV kept for trajectories whose environment has the turn: prefix-cache blocks held until the next turn finds them.

A hold is a reference to each of its blocks, so that none is evicted. Under pressure whole holds are dropped; their
blocks are then cached like any others, and are found by the next turn if nobody needed them meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence

LONG_WAIT = 0.25
"""Seconds; a trajectory that is expected back sooner is as good as here: nobody newer gets its blocks."""
AWAY_SHARE = 2
"""Of trajectories that stay away longer, one part of the pool in so many is kept from those who wait."""


@dataclass(slots=True, eq=False)
class KvHold:
    """The KV of one trajectory between turns.

    order: start of its trajectory. wait: how long it was expected to stay away. turn: the one that has ended. own: how
    many of `blocks` nobody else held then. returned: the next turn has come and waits.
    """

    key: str
    order: int
    wait: float
    turn: Sequence
    blocks: list[int]
    own: int
    returned: bool = False

    @property
    def away(self) -> bool:
        return not self.returned and self.wait >= LONG_WAIT


class KvHolds:
    """All holds, and which of them goes first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_key: dict[str, KvHold] = {}
        self.dropped_total = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_blocks(self) -> int:
        """Blocks that the holds keep; those that were others' too when a hold began are left out."""
        return sum(hold.own for hold in self._by_key.values())

    def begin(self, sequence: Sequence, blocks: list[int]) -> None:
        """The turn `sequence` ends, its blocks not yet released; `blocks` are what the next one can hit."""
        own = int(np.count_nonzero(self._pool.references(blocks) <= 1))
        self._pool.acquire(blocks)
        request, key = sequence.request, sequence.request.trajectory
        self.end(key)
        self._by_key[key] = KvHold(key, request.order, request.expected_wait, sequence, blocks, own)

    def end(self, key: str) -> None:
        """The next turn has its blocks, or there will be none."""
        hold = self._by_key.pop(key, None)
        if hold is not None:
            self._pool.release(hold.blocks)

    def returned(self, sequence: Sequence) -> None:
        """The next turn waits to be admitted."""
        hold = self._by_key.get(sequence.request.trajectory)
        if hold is not None:
            hold.returned = True
            sequence.take_keys(hold.turn)

    def gone_again(self, key: str) -> None:
        """That turn has ended before it was admitted."""
        if key in self._by_key:
            self._by_key[key].returned = False

    def clear(self) -> None:
        for key in list(self._by_key):
            self.end(key)

    def drop(self, hold: KvHold) -> None:
        """Give its blocks up before the next turn has come or could start."""
        self.dropped_total += 1
        self.end(hold.key)

    def victims(self) -> list[KvHold]:
        """All holds, in the order in which running requests take them.

        The one that stays away longest goes first, then the newest trajectory; those that came back go last.
        """
        return sorted(self._by_key.values(), key=lambda hold: (hold.returned, -hold.wait, -hold.order))

    def victims_of(self, sequence: Sequence, *, idle: bool) -> list[KvHold]:
        """Those that a waiting request may take, in their order; where nothing runs (`idle`) all, its own last.

        Else those of newer trajectories, and of those that stay away for long what exceeds their share of the pool.
        """
        request, victims = sequence.request, self.victims()
        others = [hold for hold in victims if hold.key != request.trajectory]
        if idle:
            return others + [hold for hold in victims if hold.key == request.trajectory]
        surplus = sum(hold.own for hold in others if hold.away) - self._pool.num_usable // AWAY_SHARE
        allowed = []
        for hold in others:
            if hold.order > request.order or (hold.away and surplus > 0):
                allowed.append(hold)
            if hold.away:
                surplus -= hold.own
        return allowed
