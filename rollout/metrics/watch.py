"""The observer that counts: what the worker tells becomes a row a round, what it is looked at for rows of gauges."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Literal, ParamSpec, Protocol

from protocols.fields import Record
from protocols.replies import WorkerStatus
from rollout.generation.async_engine import AsyncEngine
from rollout.metrics.gauges import Gauges
from rollout.metrics.health import Beat
from rollout.metrics.live import sentence
from rollout.metrics.observer import Observer, Round
from rollout.metrics.places import Places
from rollout.metrics.rounds import Rounds
from rollout.metrics.row import TIME_AXIS, Row
from rollout.metrics.self_check import SelfCheck
from rollout.service.score import Scorer
from rollout.service.weights import WeightUpdates

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two signs of life."""

P = ParamSpec("P")


class Watched(Protocol):
    """The service, as far as it is looked at."""

    stopping: bool
    engine: AsyncEngine
    scorer: Scorer
    weights: WeightUpdates

    @property
    def state(self) -> str: ...

    def status(self, request_id: str) -> WorkerStatus: ...


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """A fault in counting must cost a number, not a trajectory."""

    told = False

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal told
        try:
            method(*args, **kwargs)
        except Exception:
            if not told:
                log.exception("counting failed in %s, and goes on with what comes next", method.__name__)
            told = True

    return call


class Metrics(Observer):
    """interval: seconds between two rows of gauges. Used on the worker's loop.

    self_check: score a trajectory of each round again. That is work for the engine, in steps that others share.
    """

    def __init__(self, places: Places, gauges: Gauges, *, interval: float, self_check: bool = False) -> None:
        self._places = places
        self._gauges = gauges
        self._interval = interval
        self._rounds = Rounds()
        self._check = SelfCheck(places.put) if self_check else None
        self._last: Beat | None = None

    # What happens.

    @_harmless
    def batch_accepted(self, batch: Round, trajectories: int) -> None:
        self._rounds.accept(batch, trajectories)

    @_harmless
    def trajectory_ended(self, batch: Round, record: Record, version: int) -> None:
        self._rounds.add(batch, record, version, time.monotonic())
        if self._check is not None:
            self._check.offer(batch, record, version)
        for segment in record.segments:
            for turn in segment.turns:
                self._gauges.turn(turn)

    @_harmless
    def group_done(self, batch: Round, group_id: str, seconds: float) -> None:
        self._rounds.group_done(batch, group_id, seconds)

    @_harmless
    def batch_done(self, batch: Round) -> None:
        if self._check is not None:
            self._check.close(batch)
        if (values := self._rounds.close(batch)) is not None:
            self._places.put(Row("round", time.time(), values))

    @_harmless
    def weights_prepared(self, version: int, seconds: float, nbytes: int) -> None:  # noqa: ARG002 (the gauge of the version is that which serves)
        self._gauges.prepared(seconds, nbytes)

    @_harmless
    def weights_committed(self, version: int, paused_s: float) -> None:  # noqa: ARG002
        self._gauges.committed(paused_s)

    @_harmless
    def weights_failed(self, stage: Literal["prepare", "commit"]) -> None:  # noqa: ARG002
        self._gauges.failed()

    # What is looked at.

    async def watch(self, service: Watched) -> None:
        """Until cancelled: a beat every second, gauges at once, every `interval` and at the end."""
        due = time.monotonic()
        check = None
        if self._check is not None:
            check = asyncio.get_running_loop().create_task(self._check.run(service.scorer.score))
        try:
            while True:
                self._beat(service)
                if time.monotonic() >= due:
                    self._look(service)
                    due = time.monotonic() + self._interval
                await asyncio.sleep(min(BEAT_S, self._interval))
        finally:
            if check is not None:
                check.cancel()
            self._look(service)

    @_harmless
    def _beat(self, service: Watched) -> None:
        engine = service.engine
        if not service.stopping:
            engine.ping()
        beat = Beat(time.monotonic(), service.state, service.weights.version, engine.stats, engine.reported_at)
        self._places.health.beat(beat)
        self._places.say(sentence(beat, self._last, self._rounds.progress))
        self._last = beat

    @_harmless
    def _look(self, service: Watched) -> None:
        now = time.time()
        self._places.put(Row("gauges", now, {TIME_AXIS: now, **self._gauges.look(service.status(""))}))
