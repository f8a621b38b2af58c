"""Rendering and encoding beside the event loop: a template is a program, and what it is given may be long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from rollout.environments.calls import Call, Raised
from rollout.environments.line import Line, Owner, Place

RENDER_S = 120.0
"""For the prompts of one submit, or for what follows one turn. 8 MiB of text, the largest header, take some 20 s."""
PLACES = 2
"""How many render at once. Hundreds of turns end in one step, and as many threads would keep the loop from running."""
QUICK_S = 0.25
"""What takes longer gives its place to the next, and goes on."""
THREADS = 8
"""With those that went on: fewer that do not end hold up nobody else, and so few still let the loop run."""

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """The threads of one checkpoint's chat format. Used on one event loop.

    The last free one is for a session that holds none: of two, neither waits for what the other's do without end.
    """

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)
        self._line: Line[None] = Line()
        self._free = THREADS

    async def run(self, owner: Owner, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` on a thread of its own, interrupted RENDER_S after its start, or where its caller is.

        owner: for whom. How long it may wait for its start is the caller's to say. Raises what the function raises, and
        TimeoutError. What is at work in a library written in C notices an interruption only when that returns: it is
        left behind.
        """
        call: Call | None = None
        place = self._line.join(owner)
        try:
            self._serve()
            await place.got
            async with self._places:
                call = Call(lambda: function(*args, **kwargs))
                await asyncio.wait({call.task}, timeout=min(QUICK_S, RENDER_S))
            await asyncio.wait({call.task}, timeout=RENDER_S - QUICK_S)
            if not call.task.done():
                raise TimeoutError
        finally:
            if call is not None and not call.task.done():
                call.interrupt()
            self._leave(place)
        outcome = call.task.result()
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            return cast(T, outcome.value)
        finally:
            del call, outcome  # which name the error, and it this frame

    def _serve(self) -> None:
        while (place := self._line.first()) is not None:
            if place.got.done():  # cancelled, and it does not know yet
                self._line.leave(place)
                continue
            if self._free < (2 if self._line.holds(place.owner.session) else 1):
                return
            self._free -= 1
            self._line.take(place)
            place.got.set_result(None)

    def _leave(self, place: Place[None]) -> None:
        """It is over, or given up, perhaps while it waited."""
        self._line.leave(place)
        if place.got.done() and not place.got.cancelled():
            self._free += 1
            self._line.give_back(place.owner)
            self._serve()
