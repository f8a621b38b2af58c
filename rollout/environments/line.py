"""Who gets the next process: whoever holds least of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose work it is: names that are compared, nothing more."""

    session: str = ""
    trajectory: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Place(Generic[T]):
    """One wait. got: what was waited for. since: `time.monotonic()`."""

    owner: Owner
    got: asyncio.Future[T]
    since: float


@dataclass(slots=True)
class _Session(Generic[T]):
    """waiting: its trajectories in the order of their turns, each with its places. holds: by trajectory."""

    waiting: dict[str, dict[Place[T], None]] = field(default_factory=dict)
    holds: Counter[str] = field(default_factory=Counter)


class Line(Generic[T]):
    """Who waits, and who holds something.

    First is the session that holds least; of its trajectories the first that holds nothing, else the first. One that
    had its turn and waits for more goes behind the others. So whoever holds much, and for long, delays only himself.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session[T]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def join(self, owner: Owner) -> Place[T]:
        """On the event loop."""
        place: Place[T] = Place(owner, asyncio.get_running_loop().create_future(), time.monotonic())
        session = self._sessions.setdefault(owner.session, _Session())
        session.waiting.setdefault(owner.trajectory, {})[place] = None
        self._length += 1
        return place

    def leave(self, place: Place[T]) -> None:
        """Without what it waited for. Does nothing where it waits no more."""
        session = self._sessions.get(place.owner.session)
        if session is None or place not in (places := session.waiting.get(place.owner.trajectory, {})):
            return
        del places[place]
        if not places:
            del session.waiting[place.owner.trajectory]
        self._length -= 1
        self._settle(place.owner.session)

    def first(self) -> Place[T] | None:
        waiting = (session for session in self._sessions.values() if session.waiting)
        session = min(waiting, key=lambda session: session.holds.total(), default=None)
        if session is None:
            return None
        names = session.waiting
        trajectory = next((name for name in names if not session.holds[name]), next(iter(names)))
        return next(iter(names[trajectory]))

    def holds(self, session: str) -> int:
        return self._sessions[session].holds.total() if session in self._sessions else 0

    def take(self, place: Place[T]) -> None:
        """It is served: from now on it holds one, until `give_back`."""
        owner, session = place.owner, self._sessions[place.owner.session]
        session.holds[owner.trajectory] += 1
        self.leave(place)
        if (others := session.waiting.pop(owner.trajectory, None)) is not None:
            session.waiting[owner.trajectory] = others

    def give_back(self, owner: Owner) -> None:
        holds = self._sessions[owner.session].holds
        holds[owner.trajectory] -= 1
        if not holds[owner.trajectory]:
            del holds[owner.trajectory]
        self._settle(owner.session)

    def _settle(self, name: str) -> None:
        session = self._sessions[name]
        if not session.waiting and not session.holds:
            del self._sessions[name]
