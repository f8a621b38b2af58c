"""The two clients: every call with its options and its documentation is in weights.py, work.py and worker.py."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from types import TracebackType
from typing import Self

from rollout.client.batch import AsyncBatch, Batch
from rollout.client.call import Awaiting, Blocking, Call
from rollout.client.core import Core
from rollout.client.groups import GroupMaker
from rollout.client.link import Curve, Key
from rollout.client.push import PushedWeights
from rollout.client.waiting import Steps
from rollout.client.weights import WeightCalls
from rollout.client.work import B, WorkCalls
from rollout.client.worker import WorkerCalls


class Client(GroupMaker, WorkCalls[B], WeightCalls, WorkerCalls):
    """What both faces share. Options: see `RolloutClient`."""

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        timeout: float = 30.0,
        reconnect_timeout: float = 120.0,
        session: str | None = None,
        curve_server_key: Key | None = None,
        curve_public_key: Key | None = None,
        curve_secret_key: Key | None = None,
    ) -> None:
        super().__init__()
        self._core = Core(
            address,
            name=name,
            timeout=timeout,
            reconnect_timeout=reconnect_timeout,
            session=session,
            curve=Curve.of(curve_server_key, curve_public_key, curve_secret_key),
        )
        self._pushed = PushedWeights(address)
        self._updating = threading.Lock()
        self._finalizer = weakref.finalize(self, _end, self._core, self._pushed)

    @property
    def session(self) -> str | None:
        """The session's token; None before the first welcome."""
        return self._core.session

    @Call
    def close(self, *, cancel: bool = True) -> Steps[None]:
        """End the connection. Open work is cancelled, with a warning in the log that says how much; with
        `cancel=False` it goes on in the worker, for a later client with this `session`, as long as the worker's
        client timeout allows. Whoever still waits gets ClientClosed. Repeating it does nothing."""
        yield self._work(partial(_end, self._core, self._pushed, cancel=cancel), lambda _: None)


class RolloutClient(Blocking, Client[Batch]):
    """A trainer's connection to one rollout worker. Any number of threads may use it.

    address: `tcp://host:port` or `ipc://path`. timeout: seconds that a call waits for its reply unless it says
    otherwise, and after which a worker that neither sends results nor answers pings counts as gone.
    reconnect_timeout: seconds without any worker after which iteration raises ConnectionLost. session: the
    `session` of an earlier client, to go on with its open work. The curve keys are Z85 (40 characters), as text or as
    `zmq.auth.load_certificate` gives them; with a server key alone, a key pair is made up.

    The client connects in the background; `connect`, or any call, waits for the worker. Every call raises an error
    of `protocols.errors`: `Timeout` when a connected worker does not reply in time, `ConnectionLost` when there is
    none, `ClientClosed` after `close` or in a forked child.
    """

    _batch = Batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncRolloutClient(Awaiting, Client[AsyncBatch]):
    """`RolloutClient` with the same methods as coroutines; `submit` returns an `AsyncBatch`.

    It may be made outside a loop and used from several loops: the connection has its own thread.
    """

    _batch = AsyncBatch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _end(core: Core, pushed: PushedWeights, *, cancel: bool = True) -> None:
    """Not a method: a finalizer that holds its client would keep it alive."""
    core.close(cancel=cancel)
    pushed.close()
