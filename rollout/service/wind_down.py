"""The end of a worker: what runs may end, what has ended is delivered, the rest is told, all in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from protocols.errors import ShuttingDown

if TYPE_CHECKING:
    from rollout.service.service import Service, Timeouts

log = logging.getLogger(__name__)

POLL_S = 0.02
"""How often it is looked whether all results were taken over."""


async def wind_down(service: Service, timeouts: Timeouts) -> None:
    """`service` takes no new work any more. Stops the engine last."""
    runs, idle = service.runs, service.runs.idle
    end = time.monotonic() + timeouts.drain + timeouts.ack
    runs.end_waiting("abort_shutdown")
    # A dead or paused engine finishes nothing.
    await _within(idle.wait(), 0.0 if service.engine.died or service.paused else timeouts.drain)
    runs.end_running("abort_shutdown")
    await _within(idle.wait(), timeouts.ack / 2)
    runs.leave_running()
    await _within(idle.wait(), timeouts.ack / 4)
    # Delivery may use what is left of the drain: a result that is not taken over has to be made again elsewhere.
    await _within(_delivered(service), end - time.monotonic())
    if left := runs.results:
        log.warning("%d results were not acknowledged before the end", left)
    for connection in service.sessions.connections:
        for task, request_id in tuple(connection.calls.items()):
            task.cancel()
            service.refuse(connection.peer, request_id, ShuttingDown("the worker shut down before this was done"))
    if not await service.engine.close(timeouts.ack / 4):
        log.warning("the engine did not stop in time")


async def _delivered(service: Service) -> None:
    """Until every client that is still connected has what it is owed."""
    # Acks, sends and broken connections all count: looking is simpler than being told by each of them.
    while any(  # noqa: ASYNC110
        session.trajectories or session.connection.sender.depth
        for session in service.sessions.all
        if session.connection is not None
    ):
        await asyncio.sleep(POLL_S)


async def _within(awaitable: Coroutine[Any, Any, Any], seconds: float) -> None:
    """Wait, but no longer than that."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(awaitable, seconds)
