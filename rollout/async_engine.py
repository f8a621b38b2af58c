"""The engine as the worker's event loop sees it: awaitable requests, by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from engine.handle import CommitMode, Committed, EngineHandle, EngineStats
from engine.request import Completion, Failure, FinishReason, Request
from engine.step import WeightsInfo


class AsyncEngine:
    """asyncio face of an `EngineHandle`. Everything here is called from the loop that called `start`."""

    def __init__(self, handle: EngineHandle) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Start the engine (on a thread: loading may take a while)."""
        raise NotImplementedError

    async def close(self, timeout: float) -> bool:
        """Stop the engine. What is still awaited ends with `engine_dead`. False if it did not stop in time."""
        raise NotImplementedError

    async def generate(self, request: Request) -> Completion:
        """Exactly one completion; errors (a dead engine too) are returned, not raised.

        Requests of one loop tick travel as one `Submit`. Cancelling the caller aborts the request.
        """
        raise NotImplementedError

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """End requests early; their completions still arrive, with `reason` and what was sampled."""
        raise NotImplementedError

    async def prepare_weights(
        self, update_id: str, path: str, version: int, checksums: Mapping[str, str] | None = None
    ) -> WeightsInfo:
        """Raises WeightsInvalid, WeightsIncomplete, WeightsBusy, EngineDead (protocols.errors)."""
        raise NotImplementedError

    async def commit_weights(
        self,
        update_id: str,
        mode: CommitMode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: Literal["abort", "fail"] = "abort",
    ) -> Committed:
        """Raises like `prepare_weights`; then the old weights serve on."""
        raise NotImplementedError

    def discard_weights(self, update_id: str) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        """Of the last report."""
        raise NotImplementedError

    @property
    def died(self) -> Failure | None:
        raise NotImplementedError

    async def wait_died(self) -> Failure:
        raise NotImplementedError

    async def wait_version(self, version: int) -> None:
        """Return once weights of at least `version` serve. Raises EngineDead."""
        raise NotImplementedError
