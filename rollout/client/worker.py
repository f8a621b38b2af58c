"""A client's calls to the worker as a machine: what it is and does, stop and go, and the logprobs of given ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocols.errors import Internal
from protocols.fields import Sampling
from protocols.replies import Ok, Pong, Scored, Welcome, WorkerStatus
from protocols.requests import Drain, PauseRequest, Ping, ResumeRequest, Score, StatusRequest
from rollout.client.call import Call
from rollout.client.core import Core
from rollout.client.values import Ids, int32, seconds, several, uint8
from rollout.client.waiting import Steps


class WorkerCalls:
    _core: Core

    @Call
    def connect(self, timeout: float | None = None) -> Steps[Welcome]:
        """Wait for the worker and return what it said of itself as this client connected: model, limits, capabilities.
        Which weights serve now says `status`."""
        welcome: Welcome = yield self._core.greeted(timeout)
        return welcome

    @Call
    def score(
        self,
        sequences: Sequence[Ids],
        sampling: Sampling | None = None,
        *,
        sampled: Sequence[Any] | None = None,
        timeout: float = 600.0,
    ) -> Steps[Scored]:
        """Logprobs of given ids under a law (`rollout.client.sampling(...)`; neutral by default).

        `logprobs[mode][i]` is float32[L_i], entry 0 NaN. sampled: per sequence uint8[L_i], 1 where presence and
        frequency penalties count the id as sampled.
        """
        arrays = tuple(int32(ids, f"sequences[{i}]") for i, ids in enumerate(several(sequences, "sequences")))
        masks = None if sampled is None else several(sampled, "sampled")
        message = self._core.message(
            Score,
            sequences=arrays,
            sampled=None if masks is None else tuple(uint8(mask, f"sampled[{i}]") for i, mask in enumerate(masks)),
            sampling=Sampling() if sampling is None else sampling,
        )
        reply = yield from self._core.ask(message, Scored, timeout)
        for mode, rows in reply.logprobs.items():
            if [len(row) for row in rows] != [len(ids) for ids in arrays]:
                raise Internal(f"the worker's {mode} logprobs do not have the lengths of the sequences")
        return reply

    @Call
    def status(self, *, timeout: float | None = None) -> Steps[WorkerStatus]:
        """One look at the worker: what runs and waits, what serves, and its counters."""
        return (yield from self._core.ask(self._core.message(StatusRequest), WorkerStatus, timeout))

    @Call
    def ping(self, *, timeout: float | None = None) -> Steps[Pong]:
        """Does the worker answer? With its boot id and the version of the weights that serve."""
        return (yield from self._core.ask(self._core.message(Ping), Pong, timeout))

    @Call
    def pause(self, *, timeout: float | None = None) -> Steps[None]:
        """Launch no engine step until `resume`; everything stays where it is."""
        yield from self._core.ask(self._core.message(PauseRequest), Ok, timeout)

    @Call
    def resume(self, *, timeout: float | None = None) -> Steps[None]:
        """Go on after `pause` or `drain`. Not for kept trajectories: those go on by `submit(resume=...)`."""
        yield from self._core.ask(self._core.message(ResumeRequest), Ok, timeout)

    @Call
    def drain(self, drain_timeout: float, *, timeout: float | None = None) -> Steps[dict[str, int]]:
        """Make the worker refuse new work, of every client, until `resume`. Returns counts when nothing runs or
        `drain_timeout` seconds passed."""
        drain_s = seconds(drain_timeout, "drain_timeout")
        message = self._core.message(Drain, timeout_s=drain_s)
        return (yield from self._core.ask(message, Ok, self._core.wait(timeout) + drain_s)).detail
