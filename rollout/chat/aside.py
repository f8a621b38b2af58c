"""Rendering and encoding beside the event loop: a template is a program, and what it is given may be long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from rollout.environments.calls import Call, Raised

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
    """The threads of one checkpoint's chat format. Used on one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)
        self._threads = asyncio.Semaphore(THREADS)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` on a thread of its own, interrupted RENDER_S after its start, or where its caller is.

        How long it may wait for its start is the caller's to say. Raises what the function raises, and TimeoutError.
        What is at work in a library written in C notices an interruption only when that returns: it is left behind.
        """
        call: Call | None = None
        async with self._threads:
            try:
                async with self._places:
                    call = Call(lambda: function(*args, **kwargs))
                    await asyncio.wait({call.task}, timeout=min(QUICK_S, RENDER_S))
                await asyncio.wait({call.task}, timeout=RENDER_S - QUICK_S)
                if not call.task.done():
                    raise TimeoutError
            finally:
                if call is not None and not call.task.done():
                    call.interrupt()
        outcome = call.task.result()
        try:
            if isinstance(outcome, Raised):
                raise outcome.error
            return cast(T, outcome.value)
        finally:
            del call, outcome  # which name the error, and it this frame
