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
"""What takes longer gives its place to the next: one that does not end holds up nobody else."""

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """The threads of one checkpoint's chat format. Used on one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` on a thread of its own, interrupted after RENDER_S or where the caller is cancelled.

        Raises what it raises, and TimeoutError. What is at work in a library written in C notices an interruption only
        when that returns: it is left behind.
        """
        call: Call | None = None
        try:
            async with asyncio.timeout(RENDER_S):
                async with self._places:
                    call = Call(lambda: function(*args, **kwargs))
                    await asyncio.wait({call.task}, timeout=QUICK_S)
                await asyncio.wait({call.task})
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
