"""How many trajectories may run at once, so that the KV of all of them fits to their ends.

An engine sees turns; a trajectory comes back with all it had and more. So one starts only if the pool can hold what
those that run are expected to become, and this one too. The expectation is learned from trajectories that ended, and
from how far those that run have grown. Where it was too low, the newest ones wait before their next turn.

Pure: no clock, no engine. Sizes are tokens where they come in and blocks inside.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.config import BLOCK_SIZE
from engine.scheduling.kv_holds import AWAY_SHARE, LONG_WAIT

Ints = npt.NDArray[np.int64]
N = TypeVar("N", int, Ints)
Floats = npt.NDArray[np.float64]

WINDOW = 512
"""Ends that an expectation remembers: lengths drift as a policy is trained."""
KINDS = 256
"""So many are remembered, beside those that run."""
OWN_ENDS = 2
"""So many ends of its siblings tell more of a trajectory than those of all others."""
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
        self._values: Ints = np.empty(0, np.int64)
        self._means: Floats | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def largest(self) -> int:
        return self._sorted[-1] if self._sorted else 0

    def add(self, grown: int) -> None:
        insort(self._sorted, grown)
        self._means = None

    def remove(self, grown: int) -> None:
        del self._sorted[bisect_left(self._sorted, grown)]
        self._means = None

    def beyond(self, grown: Ints) -> Floats:
        """float64[n]: the mean of those that grew further than each of int64[n]; NaN where none did."""
        if self._means is None:
            counts = np.arange(len(self._sorted), 0, -1)
            self._values = np.array(self._sorted, np.int64)
            self._means = np.append(self._values[::-1].cumsum()[::-1] / counts, np.nan)
        return self._means[np.searchsorted(self._values, grown, side="right")]


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

    def expected(self, grown: Ints) -> Floats:
        """float64[n]: growth at their ends of those that have grown by int64[n] tokens."""
        ended, running = self.ended.beyond(grown), self.running.beyond(grown)
        if self.ended.largest:
            ended = np.where(np.isnan(ended), SURPRISE * grown, ended)
        # Short ones end first: while few have, those that run tell more.
        return np.fmax(np.fmax(ended, running), grown)


@dataclass(slots=True, eq=False)
class Siblings:
    """Those of one prompt. shared: its whole blocks."""

    shared: int
    running: int = 0
    ended: Growths = field(default_factory=Growths)


@dataclass(slots=True, eq=False)
class Running:
    """number: of its start. grown: tokens over its prompt. away: with its environment, for long. left: it needs no KV
    any more."""

    what: Candidate
    kind: Kind
    siblings: Siblings
    number: int = 0
    grown: int = 0
    away: bool = False
    left: bool = False


class KvBudget:
    """Which trajectories may start, and go on, given the tokens of the KV pool."""

    def __init__(self, kv_tokens: int) -> None:
        self._pool = kv_tokens // BLOCK_SIZE
        self._running: dict[Hashable, Running] = {}
        self._siblings: dict[Hashable, Siblings] = {}
        self._kinds: dict[Hashable, Kind] = {}
        self._shared = 0
        self._starts = itertools.count()
        self.on_start: Callable[[Hashable], None] = lambda _: None
        """Called with the key of each trajectory that starts."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def may_start(self, what: Candidate) -> bool:
        """True where all that run are away, and wherever everything fits."""
        new = self._made(what)
        shared = self._shared + (0 if new.siblings.running else new.siblings.shared)
        if self._at_most(len(self._running) + 1, shared) <= self._pool:
            return True
        running = list(self._counted())
        return all(one.away for one in running) or self._fit([*running, new])

    def start(self, what: Candidate) -> None:
        running = self._running[what.key] = self._made(what)
        running.number = next(self._starts)
        self._siblings[what.group] = running.siblings
        if not running.siblings.running:
            self._shared += running.siblings.shared
        running.siblings.running += 1
        running.kind.running.add(0)
        self._remember(what.kind, running.kind)
        self.on_start(what.key)

    def place(self, key: Hashable) -> int:
        """The smaller, the earlier it started: one that was kept meanwhile has started anew."""
        return self._running[key].number

    def grew(self, key: Hashable, tokens: int, wait: float = 0.0) -> bool:
        """It has so many tokens. wait: seconds for which its environment is expected to have it now.

        Returns whether that is so long that others may have its place.
        """
        running = self._running[key]
        running.kind.running.remove(running.grown)
        running.grown, running.away = max(0, tokens - running.what.prompt), wait >= LONG_WAIT
        running.kind.running.add(running.grown)
        return running.away

    def stays_away(self, key: Hashable) -> None:
        """Its environment has had it for long, whatever was expected."""
        self._running[key].away = True

    def may_go_on(self, key: Hashable) -> bool:
        """May its next turn run? Those that started before it come first; the oldest that is here always may."""
        if self._at_most(len(self._running), self._shared) <= self._pool:
            return True
        older = list(takewhile(lambda running: running.what.key != key, self._counted()))
        return all(one.away for one in older) or self._fit([*older, self._running[key]])

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

    def _remember(self, name: Hashable, kind: Kind) -> None:
        """A trajectory of the kind has started. The one that has been without for longest may be forgotten."""
        self._kinds.pop(name, None)
        self._kinds[name] = kind
        if len(self._kinds) > KINDS:
            self._kinds.pop(next((name for name, kind in self._kinds.items() if not len(kind.running)), None), None)

    def _counted(self) -> Iterator[Running]:
        return (running for running in self._running.values() if not running.left)

    def _at_most(self, count: int, shared: int) -> int:
        """Blocks of so many if all had grown as far as anything ever did: quickly told, and more than they need."""
        furthest = max((kind.largest for kind in self._kinds.values()), default=0)
        return shared + count * (_blocks(furthest) + 2)

    def _fit(self, running: list[Running]) -> bool:
        """Between two ways in which it may come: all at their ends at once, or at one pace, the short ones first.

        Each alone is off, as measured: the first holds trajectories back that would have fitted, the second drops KV.
        """
        grown = np.array([one.grown for one in running])
        away = np.array([one.away for one in running])
        now = _blocks(np.array([one.what.prompt % BLOCK_SIZE for one in running]) + grown) + 1
        more = np.where(away, 0, _blocks(np.maximum(0, _expected(running, grown).astype(np.int64) - grown)))
        shared, group = np.array([(one.siblings.shared, id(one.siblings)) for one in running]).T
        order = np.argsort(-more, kind="stable")
        _, first = np.unique(group[order], return_index=True)
        used = now[order]
        used[first] += shared[order][first]
        used = used.cumsum()
        together = used[-1] + more.sum()
        at_one_pace = (used + np.arange(1, len(running) + 1) * more[order]).max()
        # What stays with environments for long is held up to a share of the pool only.
        siblings = np.array([max(1, one.siblings.running) for one in running])
        surplus = max(0, (now + shared // siblings)[away].sum() - self._pool // AWAY_SHARE)
        return bool((together + at_one_pace) // 2 <= self._pool + surplus)


def _expected(running: list[Running], grown: Ints) -> Floats:
    """float64[n]: tokens over its prompt that each is expected to end with."""
    expected = grown.astype(np.float64)
    kinds = np.array([id(one.kind) for one in running])
    for kind in {id(one.kind): one.kind for one in running}.values():
        mine = kinds == id(kind)
        expected[mine] = kind.expected(grown[mine])
    for i, one in enumerate(running):
        if len(one.siblings.ended) >= OWN_ENDS and not np.isnan(mean := one.siblings.ended.beyond(grown[i : i + 1])[0]):
            expected[i] = mean
    most = np.array([one.what.longest - one.what.prompt for one in running])
    least: Floats = np.minimum(expected, most)
    return least


def _blocks(tokens: N) -> N:
    return -(-tokens // BLOCK_SIZE)
