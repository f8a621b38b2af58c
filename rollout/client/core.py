"""What every thread may call: hands requests to the I/O thread and gives futures back."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from protocols.codec import encode
from protocols.errors import BadRequest, Internal, RolloutError
from protocols.fields import Group, Limits
from protocols.replies import ReplyMessage, Welcome
from protocols.requests import Continue, RequestMessage, SubmitBatch
from rollout.client.errors import ClientClosed
from rollout.client.ledger import Item
from rollout.client.limits import check_size
from rollout.client.link import Curve, Link
from rollout.client.loop import Loop
from rollout.client.pending import Pending
from rollout.client.values import checked, seconds
from rollout.client.waiting import Mailbox, Steps, fail

log = logging.getLogger(__name__)

FAREWELL_MS = 500
CLOSE_S = 5.0
ADDRESS = re.compile(r"tcp://(?:\[[0-9a-fA-F:.]+\]|[^\s:/]+):(?P<port>\d+)|ipc://.+")


M = TypeVar("M", bound=RequestMessage)
R = TypeVar("R", bound=ReplyMessage)


class Core:
    """timeout: seconds that a call waits where it does not say."""

    def __init__(
        self,
        address: str,
        *,
        name: str | None,
        timeout: float,
        reconnect_timeout: float,
        session: str | None,
        curve: Curve | None,
    ) -> None:
        found = ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if found is None or not 0 < int(found["port"] or 1) < 2**16:
            raise BadRequest(f"must be tcp://host:port or ipc://path, not {address!r}", field="address")
        for field, given in (("name", name), ("session", session)):
            if given is not None and not (isinstance(given, str) and 0 < len(given) <= 256):
                raise BadRequest("must be a text of 1 to 256 characters", field=field)
        self.address = address
        self._timeout = timeout = seconds(timeout, "timeout")
        reconnect_timeout = seconds(reconnect_timeout, "reconnect_timeout")
        self.welcome: Welcome | None = None
        self.serving: int | None = None
        """Version of the worker's weights, as it last said."""
        self._session = session
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._acked: deque[str] = deque()
        self._commands: deque[tuple[Callable[[Loop], None], Future[Any] | None]] = deque()
        self._woken = False  # else the I/O thread will look, also for what is asked for until it does
        self._ended: RolloutError | None = None
        self._waker, wakeup = socket.socketpair()
        self._waker.setblocking(False)
        wakeup.setblocking(False)
        loop = partial(
            Loop,
            name=name or f"{socket.gethostname()}:{os.getpid()}",
            session=session,
            timeout=timeout,
            reconnect_timeout=reconnect_timeout,
            new_id=self.new_id,
            ack=lambda trajectory_id: self.ack([trajectory_id]),
            acked=self._acked,
            published=self._publish,
            served=self._serve,
        )
        self._thread = threading.Thread(
            target=self._run, args=(loop, curve, wakeup), name=f"rollout-client {address}", daemon=True
        )
        self._thread.start()

    @property
    def session(self) -> str | None:
        return self.welcome.session if self.welcome is not None else self._session

    @property
    def boot_id(self) -> str | None:
        return self.welcome.boot_id if self.welcome is not None else None

    def wait(self, timeout: float | None) -> float:
        """Seconds that a call may take which gives this `timeout`. Raises BadRequest."""
        return self._timeout if timeout is None else seconds(timeout, "timeout")

    def new_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def message(self, kind: type[M], **fields: Any) -> M:
        """A request with an id of its own. Raises BadRequest, naming the field that is wrong."""
        return checked(kind, id=self.new_id(), **fields)

    def check_usable(self) -> None:
        """Raises ClientClosed."""
        if os.getpid() != self._pid:
            raise ClientClosed(
                f"this client belongs to process {self._pid} and cannot be used in its fork {os.getpid()}:"
                " make a client in the child, or start the child by spawn"
            )
        if self._ended is not None:
            raise self._ended.with_traceback(None)

    def ask(self, message: RequestMessage, expected: type[R], timeout: float | None) -> Steps[R]:
        """The reply to a message. Raises the error that it was answered with."""
        pending = self._pending(message, timeout)
        self._post(lambda loop: loop.request(pending), pending.future)
        reply: Any = yield pending.future
        if not isinstance(reply, expected):
            raise Internal(f"the worker answered {message.id} with {reply.type!r}, not {expected.__name__}")
        return reply

    def submit(
        self,
        message: SubmitBatch,
        mailbox: Mailbox[Item],
        auto_ack: bool,
        timeout: float | None,
        resumed: tuple[Group, ...] = (),
    ) -> Future[Any]:
        """Also keeps the work; its results go to `mailbox`. resumed: groups of the trajectories that are to go on."""
        pending = self._pending(message, timeout)
        self._post(lambda loop: loop.submit(message, pending, mailbox, auto_ack, resumed), pending.future)
        return pending.future

    def answer(self, message: Continue, submit_id: str, timeout: float | None) -> Future[Any]:
        """Answers a turn, unless its trajectory has started again since; `submit_id` is the turn event's own id."""
        pending = self._pending(message, timeout)
        pending.turn = message.trajectory_id, submit_id
        self._post(lambda loop: loop.request(pending), pending.future)
        return pending.future

    def greeted(self, timeout: float | None) -> Future[Welcome]:
        future: Future[Welcome] = Future()
        wait = self.wait(timeout)
        self._post(lambda loop: loop.greeted(future, wait), future)
        return future

    def ack(self, trajectory_ids: Sequence[str]) -> None:
        """They leave a little later, with others."""
        if self._is_over():
            return
        with self._lock:
            self._acked.extend(trajectory_ids)
            if len(self._acked) == len(trajectory_ids):  # else those before them have not been taken yet
                self._post_quietly(lambda loop: loop.acknowledge_soon())

    def give_up(self, batch_id: str, mailbox: Mailbox[Item]) -> None:
        self._post_quietly(lambda loop: loop.give_up(batch_id, mailbox))

    def forget_update(self, update_id: str) -> None:
        self._post_quietly(lambda loop: loop.forget_update(update_id))

    def close(self, *, cancel: bool = True) -> None:
        if os.getpid() != self._pid:
            return
        self._post_quietly(lambda loop: loop.close(cancel))
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _pending(self, message: RequestMessage, timeout: float | None) -> Pending:
        wait = self.wait(timeout)
        try:
            frames = encode(message)
        except UnicodeEncodeError as error:
            raise BadRequest(f"must be text that UTF-8 can hold, not {error.object[:40]!r}") from None
        check_size(frames, self.welcome.limits if self.welcome is not None else Limits())
        return Pending(message, frames, Future(), time.monotonic() + wait, wait)

    def _post(self, command: Callable[[Loop], None], future: Future[Any] | None = None) -> None:
        """future: of whoever waits for what comes of it."""
        with self._lock:
            self.check_usable()
            self._commands.append((command, future))
            if not self._woken:
                self._woken = True
                with contextlib.suppress(BlockingIOError):  # enough bytes wait already
                    self._waker.send(b"\0")

    def _post_quietly(self, command: Callable[[Loop], None]) -> None:
        """For what has no meaning any more once the client is closed, and for finalizers."""
        if not self._is_over():
            with contextlib.suppress(RolloutError):
                self._post(command)

    def _is_over(self) -> bool:
        """Also in a fork, where a thread that is not there may hold the lock."""
        return os.getpid() != self._pid or self._ended is not None

    def _publish(self, welcome: Welcome) -> None:
        self.welcome = welcome

    def _serve(self, version: int) -> None:
        self.serving = version

    # The I/O thread

    def _run(self, make_loop: Callable[[Link], Loop], curve: Curve | None, wakeup: socket.socket) -> None:
        end: RolloutError = ClientClosed("this client is closed")
        link = Link(self.address, curve, wakeup)
        loop = make_loop(link)
        try:
            loop.run(lambda: self._obey(loop))
        except Exception as error:
            log.exception("the client's I/O thread failed")
            end = Internal(f"the client's I/O thread failed: {type(error).__name__}: {error}")
        with self._lock:
            self._ended = end
        for _, future in self._commands:
            if future is not None:
                fail(future, end)
        loop.finish(end)
        link.close(FAREWELL_MS)
        wakeup.close()
        self._waker.close()

    def _obey(self, loop: Loop) -> None:
        self._woken = False
        while self._commands:
            command, _ = self._commands[0]
            command(loop)
            self._commands.popleft()  # not before: whoever waits for one that breaks is told with those behind it
