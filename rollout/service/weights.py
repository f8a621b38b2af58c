"""Weight updates as clients see them: prepared once, committed once, however often the request arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from engine.step import WeightsInfo
from protocols.errors import BadRequest, WeightsBusy, WeightsInvalid
from protocols.replies import WeightsCommitted, WeightsPrepared
from protocols.requests import AbortWeightsRequest, CommitWeightsRequest, PrepareWeightsRequest
from rollout.generation.async_engine import AsyncEngine
from rollout.metrics.observer import Observer
from rollout.service.checks import lacking

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Update:
    """One update on its way, or served. owner: session that prepared it. committing: set from its first commit on."""

    request: PrepareWeightsRequest
    owner: str
    prepared: asyncio.Task[WeightsInfo]
    committing: asyncio.Task[WeightsCommitted] | None = None

    def same(self, request: PrepareWeightsRequest) -> bool:
        return self.request.model_copy(update={"id": request.id}) == request


class WeightUpdates:
    """One update at a time. A retry joins what its first try began, and finds the last one served after its end.

    on_commit: called after each commit, once the new version serves.
    """

    def __init__(
        self, engine: AsyncEngine, *, version: int, digest: str, on_commit: Callable[[], None], observer: Observer
    ) -> None:
        self._engine = engine
        self._on_commit = on_commit
        self._observer = observer
        self._update: Update | None = None
        self._served: Update | None = None
        self.version = version
        self.digest = digest

    @property
    def committing(self) -> bool:
        return self._update is not None and self._update.committing is not None

    # What can be refused at once is refused by the call; what it returns waits for the rest.

    def prepare(self, request: PrepareWeightsRequest, owner: str) -> Coroutine[Any, Any, WeightsPrepared]:
        """Raises WeightsBusy, BadRequest (a version that goes back); then WeightsInvalid, WeightsIncomplete."""
        update = next((known for known in (self._update, self._served) if known and known.same(request)), None)
        if update is None:
            if request.version < self.version and not request.force:
                raise BadRequest(
                    f"version {request.version} is below the serving {self.version}: count on from that, or set force",
                    field="version",
                )
            self._make_room(request, owner)
            task = asyncio.get_running_loop().create_task(self._prepare(request))
            task.add_done_callback(_look)
            update = self._update = Update(request, owner, task)
        return self._until_prepared(request, update.prepared)

    async def _until_prepared(
        self, request: PrepareWeightsRequest, preparing: asyncio.Task[WeightsInfo]
    ) -> WeightsPrepared:
        try:
            info = await asyncio.shield(preparing)
        except asyncio.CancelledError:
            if not preparing.cancelled():
                raise
            raise WeightsInvalid(f"update {request.update_id!r} was aborted", field="update_id") from None
        finally:
            del preparing  # its error, if it has one, names this frame
        return WeightsPrepared(
            id=request.id,
            update_id=request.update_id,
            version=request.version,
            digest=info.digest,
            bytes=info.nbytes,
            load_s=info.seconds,
        )

    def commit(self, request: CommitWeightsRequest) -> Coroutine[Any, Any, WeightsCommitted]:
        """Raises WeightsBusy, WeightsInvalid, BadRequest; then WeightsBusy if the drain times out with "fail"."""
        if request.mode in ("keep_kv", "recompute_kv"):
            raise lacking(request.mode, "mode")
        if (served := self._committed(request)) is not None:
            return self._until_committed(request, served)
        update = self._update
        if update is None or update.request.update_id != request.update_id:
            if self.committing:
                raise WeightsBusy("another update is being committed")
            raise BadRequest(f"no update {request.update_id!r} is prepared", field="update_id")
        if not update.prepared.done():
            raise WeightsBusy(f"update {request.update_id!r} is still being prepared")
        digest = update.prepared.result().digest
        if request.version != update.request.version:
            raise BadRequest(f"was prepared as version {update.request.version}", field="version")
        if request.digest is not None and request.digest != digest:
            raise WeightsInvalid(f"prepare found {digest}, not {request.digest}", field="digest")
        if update.committing is None:
            update.committing = asyncio.get_running_loop().create_task(self._commit(update, request))
            update.committing.add_done_callback(_look)
        return self._until_committed(request, update.committing)

    async def _until_committed(
        self, request: CommitWeightsRequest, committing: asyncio.Task[WeightsCommitted]
    ) -> WeightsCommitted:
        try:
            done = await asyncio.shield(committing)
        finally:
            del committing  # as above
        return done.model_copy(update={"id": request.id})

    def abort(self, request: AbortWeightsRequest) -> bool:
        """Forget an update. False: there was none of that id. Raises WeightsBusy while it is being committed."""
        update = self._update
        if update is None or update.request.update_id != request.update_id:
            return False
        if update.committing is not None:
            raise WeightsBusy(f"update {request.update_id!r} is being committed")
        self._discard(update)
        return True

    def forget(self, owner: str) -> None:
        """The session is gone: nobody is left to commit what it prepared."""
        update = self._update
        if update is not None and update.owner == owner and update.committing is None:
            self._discard(update)

    def _make_room(self, request: PrepareWeightsRequest, owner: str) -> None:
        if self._served is not None and self._served.request.update_id == request.update_id:
            raise WeightsInvalid(f"update {request.update_id!r} was committed with other content", field="update_id")
        update = self._update
        if update is None:
            return
        name = update.request.update_id
        if update.committing is not None or not update.prepared.done():
            raise WeightsBusy(f"update {name!r} is under way")
        if update.owner != owner:
            raise WeightsBusy(f"update {name!r} of another session is prepared: commit it or abort it first")
        if name == request.update_id:
            raise WeightsBusy(f"update {name!r} is prepared with other content: abort it or choose another id")
        # The same session gave its earlier update up, or lost track of it.
        self._discard(update)

    def _discard(self, update: Update) -> None:
        self._update = None
        update.prepared.cancel()
        self._engine.discard_weights(update.request.update_id)

    def _committed(self, request: CommitWeightsRequest) -> asyncio.Task[WeightsCommitted] | None:
        """The last commit, if that is what is asked for once more."""
        served = self._served
        if served is None or (served.request.update_id, served.request.version) != (request.update_id, request.version):
            return None
        digest = served.prepared.result().digest
        if request.digest is not None and request.digest != digest:
            raise WeightsInvalid(f"update {request.update_id!r} was committed as {digest}", field="digest")
        return served.committing

    async def _prepare(self, request: PrepareWeightsRequest) -> WeightsInfo:
        try:
            info = await self._engine.prepare_weights(
                request.update_id, request.path, request.version, request.checksums
            )
        except BaseException:
            self._observer.weights_failed("prepare")
            if self._update is not None and self._update.request is request:
                self._update = None
            raise
        self._observer.weights_prepared(request.version, info.seconds, info.nbytes)
        log.info("weights %s prepared from %s in %.2f s: %s", request.version, request.path, info.seconds, info.digest)
        return info

    async def _commit(self, update: Update, request: CommitWeightsRequest) -> WeightsCommitted:
        try:
            committed = await self._engine.commit_weights(
                request.update_id,
                "drain" if request.mode == "drain" else "abort",
                request.drain_timeout_s or 0.0,
                request.on_drain_timeout,
            )
        except BaseException:
            # The update stays prepared: the commit may be tried again, or the update aborted.
            self._observer.weights_failed("commit")
            update.committing = None
            raise
        done = WeightsCommitted(
            id=request.id,
            update_id=request.update_id,
            version=request.version,
            digest=committed.info.digest,
            paused_s=committed.paused,
        )
        self._update, self._served = None, update
        self.version, self.digest = done.version, done.digest
        log.info("weights %s serve after a pause of %.3f s: %s", self.version, committed.paused, self.digest)
        self._observer.weights_committed(done.version, done.paused_s)
        self._on_commit()
        return done


def _look(task: asyncio.Task[Any]) -> None:
    """Whoever asked may be gone: the error is then nobody's."""
    if not task.cancelled():
        task.exception()
