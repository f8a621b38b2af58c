"""The state of an environment that runs in the worker, as it can be sent."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgpack

from rollout.environments.base import Environment
from rollout.environments.calls import Call
from rollout.environments.checks import check_snapshot

SMALL = 4096
"""Bytes, as msgpack, of a state that is copied on the event loop."""


def snapshot_of(made: Environment) -> Callable[[], Any]:
    """Its `snapshot`, checked and copied: of a large state beside the event loop, for that takes its time."""

    async def later(returned: Awaitable[Any]) -> dict[str, Any]:
        state = await returned
        if _is_small(state):
            return check_snapshot(state)
        copied: dict[str, Any] = await Call(check_snapshot, state).result()
        return copied

    async def asked() -> dict[str, Any]:
        return await later(cast(Awaitable[Any], made.snapshot()))

    def taken() -> dict[str, Any] | Awaitable[dict[str, Any]]:
        returned = made.snapshot()
        return later(returned) if inspect.isawaitable(returned) else check_snapshot(returned)

    return asked if inspect.iscoroutinefunction(made.snapshot) else taken


def _is_small(state: Any) -> bool:
    try:
        return len(msgpack.packb(state)) <= SMALL
    except Exception:  # it is no plain data, and that is found there
        return False
