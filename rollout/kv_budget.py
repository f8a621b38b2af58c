"""How many trajectories may run at once, so that the KV of all of them fits to their ends.

An engine sees turns; a trajectory comes back with all it had and more. So one starts only if the pool can hold what
those that run are expected to become, and this one too. The expectation is learned from trajectories that ended, and
from how far those that run have grown. Where it was too low, the newest ones wait before their next turn.

Pure: no clock, no engine. Sizes are tokens where they come in and blocks inside.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from engine.config import BLOCK_SIZE
from engine.kv_holds import AWAY_SHARE, LONG_WAIT

WINDOW = 512
"""Ends that an expectation remembers: lengths drift as a policy is trained."""
OWN_ENDS = 2
"""Ends among its siblings that tell more of a trajectory than those of all others."""
SURPRISE = 1.25
"""What has outgrown all that ended is expected to grow by another quarter."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A trajectory that may start.

    group: those that share its prompt. kind: those whose growth is alike. prompt: its tokens. longest: tokens that it
    can become at most.
    """

    key: Hashable
    group: Hashable
    kind: Hashable
    prompt: int
    longest: int


class Growths:
    """A multiset of tokens by which trajectories grew over their prompts."""

    def __init__(self) -> None:
        self._sorted: list[int] = []
        self._sums: list[int] | None = None

    @property
    def largest(self) -> int:
        return self._sorted[-1] if self._sorted else 0

    def add(self, grown: int) -> None:
        insort(self._sorted, grown)
        self._sums = None

    def remove(self, grown: int) -> None:
        del self._sorted[bisect_left(self._sorted, grown)]
        self._sums = None

    def beyond(self, grown: int) -> tuple[int, float]:
        """Of those that grew further than that: how many there are, and their mean."""
        if self._sums is None:
            self._sums = [0, *accumulate(self._sorted)]
        at = bisect_right(self._sorted, grown)
        count = len(self._sorted) - at
        return count, (self._sums[-1] - self._sums[at]) / count if count else 0.0


class Kind:
    """Trajectories whose growth is alike: those that ended last, and those that run."""

    def __init__(self) -> None:
        self.ended = Growths()
        self.running = Growths()
        self._latest: deque[int] = deque()

    @property
    def largest(self) -> int:
        return max(self.ended.largest, self.running.largest)

    def end(self, grown: int) -> None:
        self.ended.add(grown)
        self._latest.append(grown)
        if len(self._latest) > WINDOW:
            self.ended.remove(self._latest.popleft())

    def expected(self, grown: int) -> float:
        """Growth at its end of one that has grown by so many tokens."""
        count, mean = self.ended.beyond(grown)
        if not count and self.ended.largest:
            mean = SURPRISE * grown
        # Short ones end first: while few have, those that run tell more.
        return max(grown, mean, self.running.beyond(grown)[1])


@dataclass(slots=True, eq=False)
class Siblings:
    """Those of one prompt. shared: its whole blocks."""

    shared: int
    running: int = 0
    ended: Growths = field(default_factory=Growths)


@dataclass(slots=True, eq=False)
class Running:
    """grown: tokens over its prompt. away: with its environment, for long. left: it needs no KV any more."""

    what: Candidate
    kind: Kind
    siblings: Siblings
    grown: int = 0
    away: bool = False
    left: bool = False

    @property
    def now(self) -> int:
        """Blocks it has, its prompt's left out, and one for the token in flight."""
        return _blocks(self.what.prompt % BLOCK_SIZE + self.grown) + 1

    @property
    def more(self) -> int:
        """Blocks that it is expected to need further; others may grow while it is away."""
        if self.away:
            return 0
        count, expected = self.siblings.ended.beyond(self.grown)
        if count < OWN_ENDS:
            expected = self.kind.expected(self.grown)
        return max(0, _blocks(min(int(expected), self.what.longest - self.what.prompt) - self.grown))


class KvBudget:
    """Which trajectories may start, and go on, given the tokens of the KV pool."""

    def __init__(self, kv_tokens: int) -> None:
        self._pool = kv_tokens // BLOCK_SIZE
        self._running: dict[Hashable, Running] = {}
        self._siblings: dict[Hashable, Siblings] = {}
        self._kinds: dict[Hashable, Kind] = {}
        self._shared = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def may_start(self, what: Candidate) -> bool:
        """True where nothing runs, and wherever everything fits."""
        new = self._made(what)
        shared = self._shared + (0 if new.siblings.running else new.siblings.shared)
        if self._at_most(len(self._running) + 1, shared) <= self._pool:
            return True
        running = [*self._counted(), new]
        return len(running) == 1 or self._fit(running)

    def start(self, what: Candidate) -> None:
        running = self._running[what.key] = self._made(what)
        self._siblings[what.group] = running.siblings
        self._kinds[what.kind] = running.kind
        if not running.siblings.running:
            self._shared += running.siblings.shared
        running.siblings.running += 1
        running.kind.running.add(0)

    def grew(self, key: Hashable, tokens: int, wait: float = 0.0) -> bool:
        """It has so many tokens. wait: seconds for which its environment is expected to have it now.

        Returns whether that is so long that others may have its place.
        """
        running = self._running[key]
        running.kind.running.remove(running.grown)
        running.grown, running.away = tokens - running.what.prompt, wait >= LONG_WAIT
        running.kind.running.add(running.grown)
        return running.away

    def may_go_on(self, key: Hashable) -> bool:
        """May its next turn run? Those that started before it come first; the oldest always may."""
        if self._at_most(len(self._running), self._shared) <= self._pool:
            return True
        older = list(takewhile(lambda running: running.what.key != key, self._counted()))
        return not older or self._fit([*older, self._running[key]])

    def leave(self, key: Hashable) -> None:
        """It needs no KV any more; how it ended is yet to be told."""
        self._running[key].left = True

    def end(self, key: Hashable, *, tells: bool) -> None:
        """It is over. tells: it ended by itself, so that others may be expected to end like it."""
        running = self._running.pop(key)
        siblings, kind = running.siblings, running.kind
        kind.running.remove(running.grown)
        siblings.running -= 1
        if tells:
            kind.end(running.grown)
            siblings.ended.add(running.grown)
        if not siblings.running:
            self._shared -= siblings.shared
            del self._siblings[running.what.group]

    def _made(self, what: Candidate) -> Running:
        siblings = self._siblings.get(what.group) or Siblings(what.prompt // BLOCK_SIZE)
        return Running(what, self._kinds.get(what.kind) or Kind(), siblings)

    def _counted(self) -> Iterator[Running]:
        return (running for running in self._running.values() if not running.left)

    def _at_most(self, count: int, shared: int) -> int:
        """Blocks of so many if all had grown as far as anything ever did: quickly told, and more than they need."""
        furthest = max((kind.largest for kind in self._kinds.values()), default=0)
        return shared + count * (_blocks(furthest) + 2)

    def _fit(self, running: list[Running]) -> bool:
        """Between two ways in which it may come: all at their ends at once, or at one pace, the short ones first.

        That each alone is off was measured: the first holds back a fifth that would have fitted, the second drops KV.
        """
        needs = sorted(((one.more, one) for one in running), key=lambda need: -need[0])
        used = together = at_one_pace = 0
        prompts = set()
        for count, (more, one) in enumerate(needs, 1):
            used += one.now
            if id(one.siblings) not in prompts:
                prompts.add(id(one.siblings))
                used += one.siblings.shared
            together += more
            at_one_pace = max(at_one_pace, used + count * more)
        # What stays with environments for long is held up to a share of the pool only.
        away = sum(one.now + one.siblings.shared // one.siblings.running for one in running if one.away)
        surplus = max(0, away - self._pool // AWAY_SHARE)
        return (used + together + at_one_pace) // 2 <= self._pool + surplus


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
