"""From each request to its reply. A handler answers, raises what becomes one `error`, or leaves a call to a task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from protocols import requests
from protocols.errors import EngineDead, Internal, NotReady, Overloaded, Paused, RolloutError, ShuttingDown
from protocols.replies import ErrorReply, Ok, Pong, ReplyMessage, Welcome, WorkerStatus
from rollout.chat.accept import ask, asked_in_time, prompts_in_time
from rollout.chat.aside import Aside
from rollout.environments.line import Owner
from rollout.service.checks import CAPABILITIES, check_submit, lacking
from rollout.wire.outbox import Event
from rollout.wire.sessions import Connection

if TYPE_CHECKING:
    from rollout.service.service import Service

log = logging.getLogger(__name__)

CALLS = 4096
"""Requests under way on one connection whose answers take time: more are refused, as more trajectories are."""

Handler = Callable[[Connection, Any], ReplyMessage | None]
Call = Coroutine[Any, Any, ReplyMessage | None]


class Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._asking = Aside()
        self._handlers: dict[type[requests.RequestMessage], Handler] = {
            requests.SubmitBatch: self._submit,
            requests.Continue: self._continue,
            requests.Cancel: self._cancel,
            requests.PrepareWeightsRequest: self._prepare_weights,
            requests.CommitWeightsRequest: self._commit_weights,
            requests.AbortWeightsRequest: self._abort_weights,
            requests.PauseRequest: self._pause,
            requests.ResumeRequest: self._resume,
            requests.SleepRequest: self._sleep,
            requests.WakeRequest: self._sleep,
            requests.Score: self._score,
            requests.StatusRequest: self._status,
            requests.Drain: self._drain,
            requests.Ping: self._ping,
        }

    def handle(self, peer: bytes, request: requests.RequestMessage) -> None:
        """One request from a peer, and its reply. Never raises."""
        try:
            if isinstance(request, requests.Hello):
                self._hello(peer, request)
                return
            if isinstance(request, requests.Ack):
                self._ack(peer, request)
                return
            connection = self._service.sessions.connection(peer)
            if connection is None:
                raise NotReady("say hello first: no session is open on this connection", scope="session")
            reply = self._handlers[type(request)](connection, request)
        except Exception as error:
            self._service.refuse(peer, request.id, error)
        else:
            if reply is not None:
                self._service.reply(peer, reply)

    def _hello(self, peer: bytes, request: requests.Hello) -> None:
        service = self._service
        connection, resumed = service.sessions.greet(peer, request.client, request.session)
        session = connection.session
        welcome = Welcome(
            id=request.id,
            session=session.token,
            resumed=resumed,
            boot_id=service.boot_id,
            worker_version=service.version,
            model=service.model,
            weight_version=service.weights.version,
            weight_digest=service.weights.digest,
            capabilities=CAPABILITIES,
            environments=service.environments.names,
            limits=service.limits,
            open_trajectories=tuple(session.trajectories),
        )
        log.info("client %r %s session %.8s", request.client, "resumed" if resumed else "opened", session.token)
        service.reply(peer, welcome)
        service.sessions.redeliver(connection)

    def _ack(self, peer: bytes, request: requests.Ack) -> None:
        """Has no reply. The last one of a client that has left may come after its connection was found broken."""
        connection = self._service.sessions.connection(peer)
        session = connection.session if connection else self._service.sessions.last_of(peer)
        if connection is not None:
            connection.sender.received(request.received_bytes)
        if session is not None:
            self._service.batches.acknowledge(session, request.trajectory_ids)

    def _submit(self, connection: Connection, request: requests.SubmitBatch) -> None:
        self._refuse_new_work()
        environments = self._service.environments
        if all(group.messages is None and environments.at_hand(group.environment) for group in request.groups):
            ask(request, environments.resolve)
            self._accept(connection, request)
        else:
            self._spawn(connection, request, lambda: self._submit_aside(connection, request))

    async def _submit_aside(self, connection: Connection, request: requests.SubmitBatch) -> None:
        """To render thousands of messages takes a second: that is no time to stop everything else for."""
        service, owner = self._service, Owner(connection.session.token)
        said = await asked_in_time(request, service.environments.resolve, self._asking, owner)
        rendered = await prompts_in_time(request, service.chat, said, owner)
        self._refuse_new_work()
        self._accept(connection, rendered)

    def _accept(self, connection: Connection, request: requests.SubmitBatch) -> None:
        service = self._service
        check_submit(request, model=service.model, resolve=service.environments.resolve)
        accepted = service.batches.accept(connection.session, request)
        service.reply(connection.peer, accepted)
        service.runs.admit()

    def _continue(self, connection: Connection, request: requests.Continue) -> Ok:
        taken = self._service.batches.answer(connection.session, request)
        return Ok(id=request.id, detail={"ended": int(not taken)})

    def _cancel(self, connection: Connection, request: requests.Cancel) -> Ok:
        return Ok(id=request.id, detail=self._service.batches.cancel(connection.session, request))

    def _prepare_weights(self, connection: Connection, request: requests.PrepareWeightsRequest) -> None:
        self._refuse_new_work(even_draining=True)
        self._spawn(connection, request, lambda: self._service.weights.prepare(request, connection.session.token))

    def _commit_weights(self, connection: Connection, request: requests.CommitWeightsRequest) -> None:
        self._refuse_new_work(even_draining=True)
        self._spawn(connection, request, lambda: self._service.weights.commit(request))

    def _abort_weights(self, _: Connection, request: requests.AbortWeightsRequest) -> Ok:
        return Ok(id=request.id, detail={"aborted": int(self._service.weights.abort(request))})

    def _pause(self, _: Connection, request: requests.PauseRequest) -> Ok:
        self._service.paused = True
        self._service.engine.pause()
        return Ok(id=request.id)

    def _resume(self, _: Connection, request: requests.ResumeRequest) -> Ok:
        """Takes back a `pause` and a `drain`; not a shutdown."""
        self._service.paused = self._service.draining = False
        self._service.engine.resume()
        return Ok(id=request.id)

    def _sleep(self, _: Connection, __: requests.SleepRequest | requests.WakeRequest) -> ReplyMessage:
        raise lacking("sleep", "type")

    def _score(self, connection: Connection, request: requests.Score) -> None:
        service = self._service
        self._refuse_new_work()
        if service.paused:
            raise Paused("the engine is paused: a score would not come before `resume`")
        self._spawn(connection, request, lambda: service.scorer.score(request), bulk=True)

    def _status(self, _: Connection, request: requests.StatusRequest) -> WorkerStatus:
        return self._service.status(request.id)

    def _drain(self, connection: Connection, request: requests.Drain) -> None:
        async def wait() -> Ok:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.runs.idle.wait(), request.timeout_s)
            admission = self._service.runs.admission
            return Ok(id=request.id, detail={"running": admission.running, "waiting": admission.waiting})

        self._spawn(connection, request, wait)
        self._service.draining = True

    def _ping(self, _: Connection, request: requests.Ping) -> Pong:
        return self._service.pong(request.id)

    def _refuse_new_work(self, *, even_draining: bool = False) -> None:
        service = self._service
        if service.engine.died is not None:
            raise EngineDead(service.engine.died.message)
        if service.stopping:
            raise ShuttingDown("the worker is shutting down: take the work to another one")
        if service.draining and not even_draining:
            raise ShuttingDown("the worker is drained: `resume` opens it again")

    def _spawn(
        self, connection: Connection, request: requests.RequestMessage, start: Callable[[], Call], *, bulk: bool = False
    ) -> None:
        """Answer when the call that `start` makes is done. Ends with its connection, since nobody could be told."""
        if len(connection.calls) >= CALLS:
            raise Overloaded(f"{CALLS} requests of this connection are under way: ask again when some are answered")
        call = start()

        async def answer() -> None:
            try:
                reply = await call
            except Exception as error:
                self._service.refuse(connection.peer, request.id, error)
            else:
                if reply is None:
                    return
                if bulk:
                    unsent = functools.partial(as_error_reply, request.id)
                    connection.sender.put(Event(("reply", request.id), lambda: reply, instead=unsent))
                else:
                    self._service.reply(connection.peer, reply)

        def end(task: asyncio.Task[None]) -> None:
            del connection.calls[task]
            # Cancelled before its first step, it has not even begun to await the call.
            call.close()

        task = asyncio.get_running_loop().create_task(answer())
        connection.calls[task] = request.id
        task.add_done_callback(end)


def as_error_reply(request_id: str, error: Exception) -> ErrorReply:
    """What a client is told of an exception: a fault of ours is `internal`, and its traceback goes to our log."""
    if isinstance(error, RolloutError):
        return ErrorReply(id=request_id, error=error.failure())
    log.error("request %r failed", request_id, exc_info=error)
    return ErrorReply(id=request_id, error=Internal(f"{type(error).__name__}: {error}").failure())
