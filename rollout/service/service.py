"""The worker: one socket, one engine, one event loop, from ready to the last result delivered."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import zmq

from engine.handle import EngineHandle, EngineStats
from protocols.codec import decode_request, encode
from protocols.errors import BadRequest
from protocols.fields import Limits, ModelInfo, Record, Times
from protocols.replies import Pong, ReplyMessage, TurnDone, WorkerStatus
from rollout.batches.admission import Admission
from rollout.batches.batches import Batches
from rollout.batches.runs import Runs
from rollout.chat.format import ChatFormat
from rollout.command.versions import ours
from rollout.environments.answer import End
from rollout.environments.base import Rewards, TextCodec
from rollout.environments.pool import Owner
from rollout.environments.registry import Registry
from rollout.generation.async_engine import AsyncEngine
from rollout.generation.kv_budget import KvBudget
from rollout.generation.kv_gate import KvGate
from rollout.metrics.observer import Observer
from rollout.service.handlers import Handlers, as_error_reply
from rollout.service.repeated import Repeated
from rollout.service.score import Scorer
from rollout.service.weights import WeightUpdates
from rollout.service.wind_down import wind_down
from rollout.trajectory.rollout import Rollout
from rollout.trajectory.spec import TrajectorySpec
from rollout.trajectory.trajectory import Trajectory
from rollout.wire.channel import Channel
from rollout.wire.sessions import Session, Sessions

log = logging.getLogger(__name__)

PING_S = 0.5
"""How often each client's connection is looked at."""
LINGER_S = 0.3
"""How long frames already handed to libzmq may take to leave at the very end."""
STATS = tuple(field.name for field in dataclasses.fields(EngineStats))


@dataclass(frozen=True, slots=True)
class Served:
    """What this worker serves. weight_version, weight_digest: of what was loaded at start.

    kv_tokens: of the KV pool, where no more trajectories are to run than fit into it to their ends; else None.
    """

    model: ModelInfo
    weight_version: int
    weight_digest: str
    environments: Registry
    tokenizer: TextCodec | None = None
    chat: ChatFormat | None = None
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. client: an unreachable client's work is kept. drain: running work may go on after a signal.

    ack: what comes after that (ending the rest, delivery, acknowledgements, the engine's stop) may take.
    """

    client: float = 3.0
    drain: float = 30.0
    ack: float = 1.0


class Service:
    """handle: an engine not yet started. at_once, max_waiting: see Admission. observer: is told what happens."""

    def __init__(
        self,
        channel: Channel,
        handle: EngineHandle,
        served: Served,
        *,
        limits: Limits,
        timeouts: Timeouts,
        at_once: int,
        max_waiting: int,
        observer: Observer | None = None,
    ) -> None:
        observer = observer or Observer()
        self.boot_id = secrets.token_hex(8)
        self.version = ours()
        self.model = served.model
        self.environments = served.environments
        self.chat = served.chat
        self.limits = limits.model_copy(update={"max_context": served.model.max_context})
        self.engine = AsyncEngine(handle)
        self.paused = self.draining = self.stopping = False
        self._channel = channel
        self._tokenizer = served.tokenizer
        self._timeouts = timeouts
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self.weights = WeightUpdates(
            self.engine,
            version=served.weight_version,
            digest=served.weight_digest,
            on_commit=lambda: self.runs.admit(),
            observer=observer,
        )
        kv = None if served.kv_tokens is None else KvBudget(served.kv_tokens)
        self._generator = self.engine if kv is None else KvGate(self.engine, kv, on_room=lambda: self.runs.admit())
        self.runs = Runs(
            Admission(
                result_bytes=limits.result_bytes,
                at_once=at_once,
                max_waiting=max_waiting,
                max_context=served.model.max_context,
                kv=kv,
            ),
            launch=self._launch,
            untouched=self._untouched,
            version=lambda: self.weights.version,
            observer=observer,
        )
        self.batches = Batches(self.runs, limits=self.limits)
        self.scorer = Scorer(self.engine, served.model, self.limits)
        self.sessions = Sessions(self._send, limits=limits, client_timeout=timeouts.client, on_expired=self._expired)
        self._handlers = Handlers(self)
        self._unreadable = Repeated("messages that could not be read")
        self._undeliverable = Repeated("replies that reached nobody, since who had asked was gone or reads none")
        self._gone = 0
        self._cut_off = 0

    async def run(self, on_ready: Callable[[], None]) -> bool:
        """Serve until `stop` or the engine's death, then drain. False: the engine died."""
        await self.engine.start()
        death = asyncio.get_running_loop().create_task(self.engine.wait_died())
        stop = asyncio.get_running_loop().create_task(self._stop.wait())
        self._channel.start(self._receive)
        on_ready()
        tick = asyncio.get_running_loop().create_task(self._tick())
        try:
            await asyncio.wait((death, stop), return_when=asyncio.FIRST_COMPLETED)
            if (failure := self.engine.died) is not None:
                log.critical("the engine died: %s", failure.message)
            self.stopping = True
            await wind_down(self, self._timeouts)
            return failure is None
        finally:
            for task in (death, stop, tick):
                task.cancel()
            await self.environments.close()
            self._channel.close(LINGER_S)
            self._tell(math.inf)

    def stop(self) -> None:
        """Begin to drain: `run` returns when that is done."""
        self._stop.set()

    def _launch(self, spec: TrajectorySpec, on_turn: Callable[[TurnDone], None]) -> Rollout:
        return Rollout(
            spec,
            engine=self._generator,
            environment=self.environments.resolve(
                spec.group.environment, Owner(spec.session, spec.batch_id, spec.trajectory_id)
            ),
            model=self.model,
            on_turn=on_turn,
            tokenizer=self._tokenizer,
            chat=self.chat,
        )

    def _untouched(self, spec: TrajectorySpec, end: End) -> Record:
        waited = 0.0 if spec.accepted is None else time.monotonic() - spec.accepted
        trajectory = Trajectory(spec, self.model)
        partial = spec.partial or trajectory.partial()
        return trajectory.to_record(end, Times(queue=waited), waited, Rewards(), partial)

    # Messages in and out.

    def _receive(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        try:
            request = decode_request([frame.buffer for frame in frames], self.limits)
        except Exception as error:
            self._unreadable.count(f"since {error}")
            request_id = error.request_id if isinstance(error, BadRequest) else ""
            if request_id or self.sessions.connection(peer) is not None:
                self.refuse(peer, request_id, error)
            return
        self._handlers.handle(peer, request)

    def reply(self, peer: bytes, message: ReplyMessage) -> None:
        if not self._send(peer, encode(message)):
            self._undeliverable.count(f"the {type(message).__name__} to request {message.id!r}")

    def refuse(self, peer: bytes, request_id: str, error: Exception) -> None:
        self.reply(peer, as_error_reply(request_id, error))

    def pong(self, request_id: str) -> Pong:
        return Pong(id=request_id, boot_id=self.boot_id, weight_version=self.weights.version)

    def _send(self, peer: bytes, frames: list[bytes | memoryview]) -> bool:
        if self._channel.send(peer, frames):
            return True
        self.sessions.gone(peer)
        return False

    # Twice a second.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            try:
                now = time.monotonic()
                self.sessions.check(now, partial(self._channel.send, frames=encode(self.pong(""))))
                self._tell(now)
            except Exception:
                log.exception("the look at the clients failed")

    def _tell(self, now: float) -> None:
        for fault in (self._unreadable, self._undeliverable):
            fault.tell(now)

    def _expired(self, session: Session) -> None:
        self._gone += 1
        self.weights.forget(session.token)
        unfinished = self.batches.expire(session)
        self._cut_off += unfinished
        level = logging.WARNING if unfinished else logging.INFO
        log.log(level, "client %r is gone: %d trajectories cancelled", session.client, unfinished)

    # What the worker says of itself.

    @property
    def state(self) -> Literal["ready", "paused", "updating", "draining", "dead"]:
        if self.engine.died is not None:
            return "dead"
        if self.stopping or self.draining:
            return "draining"
        if self.weights.committing:
            return "updating"
        return "paused" if self.paused else "ready"

    def status(self, request_id: str) -> WorkerStatus:
        return WorkerStatus(
            id=request_id,
            state=self.state,
            boot_id=self.boot_id,
            uptime_s=time.monotonic() - self._started,
            weight_version=self.weights.version,
            weight_digest=self.weights.digest,
            trajectories_running=self.runs.admission.running,
            trajectories_waiting=self.runs.admission.waiting,
            results_unacknowledged=self.runs.results,
            sessions=len(self.sessions),
            engine={name: float(getattr(self.engine.stats, name)) for name in STATS},
            wire=self._wire(),
            environments=self.environments.stats,
        )

    def _wire(self) -> dict[str, float]:
        senders = [connection.sender for connection in self.sessions.connections]
        wanted = self.runs.admission.wanted_version
        return {
            "rx_bytes": self._channel.rx_bytes,
            "tx_bytes": self._channel.tx_bytes,
            "queue_depth": sum(sender.depth for sender in senders),
            "window_stalls": sum(sender.stalls for sender in senders),
            "credit_stalls": self.runs.admission.stalls,
            "reserved_bytes": self.runs.admission.reserved_bytes,
            "kept_bytes": self.runs.admission.kept_bytes,
            "kept": self.runs.admission.kept,
            "waiting_for_weights": self.runs.admission.waiting_for_weights,
            **({} if wanted is None else {"wanted_version": wanted}),
            "unreadable": self._unreadable.total,
            "undeliverable": self._undeliverable.total,
            "clients_gone": self._gone,
            "trajectories_cut_off": self._cut_off,
            "results_dropped": self.batches.results_dropped,
        }
