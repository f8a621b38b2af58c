"""A scripted worker: a real ROUTER on a thread, the real codec, no engine. What it answers is a formula.

By default it welcomes, accepts and finishes every trajectory at once. `hold` keeps trajectories running until
`finish`; `answers` replaces the reply to one kind of request; `cut` breaks every connection and keeps all state, a
second FakeWorker at the same address is a restarted process.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from protocols import (
    SOURCE_PROMPT,
    SOURCE_SAMPLED,
    STATUS_OF,
    Accepted,
    Ack,
    BatchDone,
    Cancel,
    CommitWeightsRequest,
    Continue,
    Drain,
    ErrorReply,
    Group,
    Hello,
    Limits,
    ModelInfo,
    Ok,
    Ping,
    Pong,
    PrepareWeightsRequest,
    Record,
    Request,
    RolloutError,
    Score,
    Scored,
    Segment,
    StatusRequest,
    SubmitBatch,
    TrajectoryDone,
    Turn,
    TurnDone,
    WeightsCommitted,
    WeightsIncomplete,
    WeightsPrepared,
    Welcome,
    WorkerStatus,
    decode_request,
    encode,
    split,
)
from protocols.replies import ReplyMessage, is_event

R = TypeVar("R")
WAIT_S = 20.0

VOCAB = 1000
SAMPLED = 4
"""Tokens of every sampled turn."""


def make_record(
    trajectory_id: str, group: Group, batch_id: str, *, reason: str = "stop", sampled: int = SAMPLED, **changes: Any
) -> Record:
    """Prompt, then `sampled` ids that depend on the sample's index."""
    at = group.trajectory_ids.index(trajectory_id)
    index = group.sample_indices[at] if group.sample_indices else at
    size = len(group.prompt)
    source = np.array([SOURCE_PROMPT] * size + [SOURCE_SAMPLED] * sampled, np.uint8)
    segment = Segment(
        token_ids=np.concatenate([group.prompt, np.full(sampled, index + 1, np.int32)]),
        source=source,
        logprobs=np.where(source == SOURCE_SAMPLED, -0.5, 0.0).astype(np.float32),
        loss_mask=(source == SOURCE_SAMPLED).astype(np.uint8),
        weight_versions=np.array([[7, sampled]], np.int64).reshape(-1, 2),
        kv_versions=np.array([[7, sampled]], np.int64).reshape(-1, 2),
        turns=(Turn(index=0, start=size, length=sampled, finish_reason="stop"),),
    )
    fields: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "group_id": group.id,
        "batch_id": batch_id,
        "sample_index": index,
        "status": STATUS_OF[reason],  # type: ignore[index]
        "finish_reason": reason,
        "segments": (segment,),
        "sampling": group.sampling,
        "metadata": group.metadata,
        "purpose": group.purpose,
    }
    return Record(**(fields | changes))


@dataclass
class Session:
    """peer: the newest connection. running: id -> (submit, group). owed: records not yet acknowledged."""

    token: str
    peer: bytes
    running: dict[str, tuple[SubmitBatch, Group]] = field(default_factory=dict)
    owed: dict[str, TrajectoryDone] = field(default_factory=dict)
    turns: dict[str, TurnDone] = field(default_factory=dict)


class FakeWorker:
    """Attributes are read by tests through `wait_for`, which holds the lock under which the thread works."""

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        boot_id: str = "boot-1",
        hold: bool = False,
        limits: Limits | None = None,
        weight_version: int = 0,
        weight_digest: str = "digest-0",
        resumes: bool = True,
        curve: tuple[bytes, bytes] | None = None,
        mangle: Callable[[ReplyMessage, list[Any]], list[Any]] | None = None,
        refusals: dict[type[Any], RolloutError] | None = None,
        silent: Sequence[type[Any]] = (),
        answers: dict[type[Any], Callable[[Any], ReplyMessage | None]] | None = None,
    ) -> None:
        self.boot_id = boot_id
        self.hold = hold
        self.limits = limits or Limits()
        self.weight_version = weight_version
        self.weight_digest = weight_digest
        self.resumes = resumes
        self.mangle = mangle
        self.answers = dict(answers or {})
        for kind, error in [*(refusals or {}).items(), *((kind, None) for kind in silent)]:
            self.refuse(kind, error)
        self.cancels = True
        self.requests: list[Request] = []
        self.peers: list[bytes] = []
        self.sessions: dict[str, Session] = {}
        self.prepared: dict[str, PrepareWeightsRequest] = {}
        self.event_bytes: list[int] = []
        """Bytes of the event frames sent, one entry a packet."""
        self._curve = curve
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waker, self._wakeup = socket.socketpair()
        self._context = zmq.Context()
        self._socket = self._bind(address)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="fake worker", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What tests do

    def stop(self) -> None:
        """Like a killed process: nothing is said, connections break."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._waker.send(b"\0")
            self._thread.join(WAIT_S)
            self._waker.close()
            self._wakeup.close()

    def do(self, action: Callable[[], R]) -> R:
        """Run on the worker's thread."""
        results: queue.SimpleQueue[R] = queue.SimpleQueue()
        self._commands.put(lambda: results.put(action()))
        self._waker.send(b"\0")
        return results.get(timeout=WAIT_S)

    def wait_for(self, predicate: Callable[[], R]) -> R:
        """Until the predicate holds; returns what it returned. Fails the test after WAIT_S seconds."""
        with self._changed:
            assert self._changed.wait_for(predicate, WAIT_S), f"never happened; requests were {self.kinds()}"
            return predicate()

    def kinds(self) -> list[str]:
        """Types of the requests so far, without those that come by the clock."""
        return [request.type for request in self.requests if request.type not in ("ping", "ack")]

    def of(self, kind: type[R]) -> list[R]:
        return [request for request in self.requests if isinstance(request, kind)]

    def acknowledged(self) -> set[str]:
        return {name for ack in self.of(Ack) for name in ack.trajectory_ids}

    @property
    def session(self) -> Session:
        (session,) = self.sessions.values()
        return session

    def refuse(self, kind: type[Any], error: RolloutError | None) -> None:
        """Answer such requests with an error; with None, not at all."""

        def answer(_: Any) -> ReplyMessage | None:
            if error is not None:
                raise error
            return None

        self.answers[kind] = answer

    def finish(self, *trajectory_ids: str, reason: str = "stop", **changes: Any) -> None:
        """End running trajectories; all of them when none is named."""
        self.do(lambda: self._finish(trajectory_ids or None, reason, changes))

    def send(self, message: ReplyMessage) -> None:
        """Any message, to the one session's connection."""
        self.do(lambda: self._send(self.session.peer, message))

    def send_raw(self, frames: Sequence[bytes]) -> None:
        def action() -> None:
            with contextlib.suppress(zmq.ZMQError):  # it may have left, after the last ones
                self._socket.send_multipart([self.session.peer, *frames])

        self.do(action)

    def cut(self) -> None:
        """Break every connection, keep every session, listen again at the same address."""

        def action() -> None:
            self._socket.close(linger=0)
            self._socket = self._bind(self.address)

        self.do(action)

    # The thread

    def _bind(self, address: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
        if self._curve is not None:
            router.curve_server = True
            router.curve_publickey, router.curve_secretkey = self._curve
        for attempt in itertools.count():
            try:
                router.bind(address)
            except zmq.ZMQError:
                # The address is free a moment after the socket that held it was closed.
                if attempt == 200:
                    raise
                threading.Event().wait(0.02)
            else:
                return router
        raise AssertionError

    def _run(self) -> None:
        while True:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wakeup.fileno(), zmq.POLLIN)
            ready = dict(poller.poll())
            with self._changed:
                if self._wakeup.fileno() in ready:
                    self._wakeup.recv(1)
                    command = self._commands.get()
                    if command is None:
                        break
                    command()
                elif self._socket in ready:
                    peer, *frames = self._socket.recv_multipart()
                    request = decode_request(frames, self.limits)
                    self.requests.append(request)
                    self.peers.append(peer)
                    self._answer(peer, request)
                self._changed.notify_all()
        self._socket.close(linger=0)
        self._context.term()

    def _send(self, peer: bytes, message: ReplyMessage) -> None:
        for packet in split(
            encode(message), self.limits.chunk_bytes, number=next(self._numbers), message_id=message.id
        ):
            frames = list(packet.frames)
            if is_event(message):
                self.event_bytes.append(packet.nbytes)
            if self.mangle is not None:
                frames = self.mangle(message, frames)
            try:
                self._socket.send_multipart([peer, *frames])
            except zmq.ZMQError:
                return  # the peer has gone

    def _answer(self, peer: bytes, request: Request) -> None:
        reply: ReplyMessage | None
        if type(request) in self.answers:
            try:
                reply = self.answers[type(request)](request)
            except RolloutError as error:
                reply = ErrorReply(id=request.id, error=error.failure())
        else:
            reply = self._reply(peer, request)
        if reply is not None:
            self._send(peer, reply)
        if isinstance(request, Hello) and isinstance(reply, Welcome):
            session = self.sessions[reply.session]
            for event in [*session.owed.values(), *session.turns.values()]:
                self._send(peer, event)
        if isinstance(request, SubmitBatch) and isinstance(reply, Accepted):
            self._start(self._session_of(peer), request)
        if isinstance(request, Cancel) and self.cancels:
            self._finish(self._named(request), "abort_client", {})

    def _reply(self, peer: bytes, request: Request) -> ReplyMessage | None:
        match request:
            case Hello():
                return self.welcome(peer, request)
            case SubmitBatch():
                count = sum(len(group.trajectory_ids) for group in request.groups)
                return Accepted(id=request.id, batch_id=request.batch_id, trajectories=count)
            case Ack():
                session = self._session_of(peer)
                for name in request.trajectory_ids:
                    session.owed.pop(name, None)
                return None
            case Continue():
                return self._continue(self._session_of(peer), request)
            case Cancel():
                return Ok(id=request.id, detail={"cancelled": len(self._named(request))})
            case PrepareWeightsRequest():
                self.prepared[request.update_id] = request
                digest = f"digest-{request.version}"
                return WeightsPrepared(
                    id=request.id,
                    update_id=request.update_id,
                    version=request.version,
                    digest=digest,
                    bytes=10,
                    load_s=0.25,
                )
            case CommitWeightsRequest():
                return self._commit(request)
            case Score():
                rows = tuple(np.full(len(ids), -1.0, np.float32) for ids in request.sequences)
                return Scored(id=request.id, weight_version=self.weight_version, logprobs={"processed": rows})
            case StatusRequest():
                return self._status(request)
            case Ping():
                return Pong(id=request.id, boot_id=self.boot_id, weight_version=self.weight_version)
            case Drain():
                return Ok(id=request.id, detail={"running": 0})
        return Ok(id=request.id)

    def welcome(self, peer: bytes, request: Hello) -> Welcome:
        resumed = self.resumes and request.session in self.sessions
        token = request.session if resumed and request.session is not None else f"session-{next(self._numbers)}"
        session = self.sessions.setdefault(token, Session(token, peer))
        session.peer = peer
        return Welcome(
            id=request.id,
            session=token,
            resumed=resumed,
            boot_id=self.boot_id,
            worker_version="fake",
            model=ModelInfo(architecture="fake", dtype="float32", vocab_size=VOCAB, max_context=512),
            weight_version=self.weight_version,
            weight_digest=self.weight_digest,
            capabilities=(),
            environments=("scripted", "remote"),
            limits=self.limits,
            open_trajectories=(*session.running, *session.owed),
        )

    def _commit(self, request: CommitWeightsRequest) -> ReplyMessage:
        if request.update_id not in self.prepared:
            error = WeightsIncomplete(f"update {request.update_id} was not prepared", field="update_id")
            return ErrorReply(id=request.id, error=error.failure())
        self.weight_version, self.weight_digest = request.version, f"digest-{request.version}"
        return WeightsCommitted(
            id=request.id,
            update_id=request.update_id,
            version=self.weight_version,
            digest=self.weight_digest,
            paused_s=0.125,
        )

    def _status(self, request: StatusRequest) -> WorkerStatus:
        return WorkerStatus(
            id=request.id,
            state="ready",
            boot_id=self.boot_id,
            uptime_s=1.0,
            weight_version=self.weight_version,
            weight_digest=self.weight_digest,
            trajectories_running=sum(len(session.running) for session in self.sessions.values()),
            trajectories_waiting=0,
            results_unacknowledged=sum(len(session.owed) for session in self.sessions.values()),
            sessions=len(self.sessions),
        )

    def _session_of(self, peer: bytes) -> Session:
        return next(session for session in self.sessions.values() if session.peer == peer)

    def _named(self, request: Cancel) -> list[str]:
        return [
            name
            for session in self.sessions.values()
            for name, (submit, group) in session.running.items()
            if name in request.trajectory_ids or group.id in request.group_ids or submit.batch_id in request.batch_ids
        ]

    def _start(self, session: Session, submit: SubmitBatch) -> None:
        for group in submit.groups:
            for name in group.trajectory_ids:
                session.running[name] = submit, group
                if group.environment.name == "remote":
                    self._turn(session, name, 0)
        if not self.hold:
            self._finish([name for name in session.running if name not in session.turns], "stop", {})

    def _turn(self, session: Session, name: str, index: int) -> None:
        submit, group = session.running[name]
        start = len(group.prompt) + index * SAMPLED
        event = TurnDone(
            id=submit.id,
            trajectory_id=name,
            turn=Turn(index=index, start=start, length=SAMPLED, finish_reason="stop"),
            total_len=start + SAMPLED,
            token_ids=np.full(SAMPLED, index, np.int32),
            logprobs=np.full(SAMPLED, -0.5, np.float32),
        )
        session.turns[name] = event
        self._send(session.peer, event)

    def _continue(self, session: Session, request: Continue) -> ReplyMessage:
        waiting = session.turns.pop(request.trajectory_id)
        assert (request.turn, request.expected_len) == (waiting.turn.index, waiting.total_len)
        if request.done:
            self._finish([request.trajectory_id], "env_done", {"reward": request.reward})
        else:
            self._turn(session, request.trajectory_id, request.turn + 1)
        return Ok(id=request.id)

    def _finish(self, trajectory_ids: Sequence[str] | None, reason: str, changes: dict[str, Any]) -> None:
        for session in self.sessions.values():
            for name in list(session.running) if trajectory_ids is None else trajectory_ids:
                if name not in session.running:
                    continue
                submit, group = session.running.pop(name)
                session.turns.pop(name, None)
                record = make_record(name, group, submit.batch_id, reason=reason, **changes)
                event = TrajectoryDone(id=submit.id, record=record)
                session.owed[name] = event
                self._send(session.peer, event)
                if all(submit.batch_id != other.batch_id for other, _ in session.running.values()):
                    counts = {record.status: 1}
                    self._send(
                        session.peer,
                        BatchDone(id=submit.id, batch_id=submit.batch_id, counts=counts, wall_s=1.0),
                    )
