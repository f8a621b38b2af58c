"""Who gets the next process: whoever holds least of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose work it is: names that are compared, nothing more."""

    session: str = ""
    batch: str = ""
    trajectory: str = ""


NOBODY: Final = Owner()


@dataclass(frozen=True, slots=True, eq=False)
class Place(Generic[T]):
    """One wait. got: what was waited for. since: `time.monotonic()`."""

    owner: Owner
    got: asyncio.Future[T]
    since: float


@dataclass(slots=True)
class _Share(Generic[T]):
    """Of a session, a batch of it, or a trajectory of that. parts: by name, in the order of their turns.

    holds, waits: of it and all its parts. places: of a trajectory.
    """

    parts: dict[str, _Share[T]] = field(default_factory=dict)
    places: dict[Place[T], None] = field(default_factory=dict)
    holds: int = 0
    waits: int = 0


class Line(Generic[T]):
    """Who waits, and who holds something.

    First is the session that holds least, of its batches the one that holds least, of that one's trajectories too;
    among equals the first that came. One that had its turn and waits for more goes behind its equals. So whoever holds
    much, and for long, delays only himself.
    """

    def __init__(self) -> None:
        self._all: _Share[T] = _Share()

    def __len__(self) -> int:
        return self._all.waits

    def join(self, owner: Owner) -> Place[T]:
        """On the event loop."""
        place: Place[T] = Place(owner, asyncio.get_running_loop().create_future(), time.monotonic())
        share = self._all
        share.waits += 1
        for name in _names(owner):
            part = share.parts.get(name) or _Share()
            if not part.waits:
                share.parts.pop(name, None)
                share.parts[name] = part
            part.waits += 1
            share = part
        share.places[place] = None
        return place

    def leave(self, place: Place[T]) -> None:
        """Without what it waited for. Does nothing where it waits no more."""
        shares = list(self._shares(place.owner))
        if place not in shares[-1].places:
            return
        del shares[-1].places[place]
        for share in shares:
            share.waits -= 1
        self._settle(place.owner)

    def first(self) -> Place[T] | None:
        share = self._all
        if not share.waits:
            return None
        while share.parts:
            share = _least(share.parts.values())
        return next(iter(share.places))

    def holds(self, session: str) -> int:
        return self._all.parts[session].holds if session in self._all.parts else 0

    def take(self, place: Place[T]) -> None:
        """It is served: from now on it holds one, until `give_back`."""
        share = self._all
        share.holds += 1
        for name in _names(place.owner):
            part = share.parts[name] = share.parts.pop(name)
            part.holds += 1
            share = part
        self.leave(place)

    def give_back(self, owner: Owner) -> None:
        for share in self._shares(owner):
            share.holds -= 1
        self._settle(owner)

    def _shares(self, owner: Owner) -> Iterator[_Share[T]]:
        """From all to the trajectory's, which is an empty one where it neither waits nor holds anything."""
        share = self._all
        yield share
        for name in _names(owner):
            share = share.parts.get(name) or _Share()
            yield share

    def _settle(self, owner: Owner) -> None:
        """Nothing is remembered of who neither waits nor holds anything."""
        share = self._all
        for name in _names(owner):
            part = share.parts[name]
            if not part.waits and not part.holds:
                del share.parts[name]
                return
            share = part


def _least(parts: Collection[_Share[T]]) -> _Share[T]:
    """Who holds least of those that wait. Of many trajectories most hold nothing: not all have to be looked at."""
    empty = next((part for part in parts if part.waits and not part.holds), None)
    return empty or min((part for part in parts if part.waits), key=lambda part: part.holds)


def _names(owner: Owner) -> tuple[str, str, str]:
    return owner.session, owner.batch, owner.trajectory
