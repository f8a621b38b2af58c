"""The client for asyncio."""

# ruff: noqa: ASYNC109  (both faces take `timeout`, so that a program can change from one to the other)
from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from protocols.fields import Group, Sampling
from protocols.replies import Pong, Scored, TurnDone, WeightsCommitted, WeightsPrepared, Welcome, WorkerStatus
from rollout.client import calls
from rollout.client.batch import AsyncBatch
from rollout.client.calls import Mode, Surplus, WeightUpdate
from rollout.client.core import Core
from rollout.client.groups import GroupMaker, Ids
from rollout.client.link import Curve
from rollout.client.push import PushedWeights
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import arun

if TYPE_CHECKING:
    from rollout.client.push import Weights

Path = str | os.PathLike[str]


class AsyncRolloutClient(GroupMaker):
    """`RolloutClient` with the same methods as coroutines; `submit` returns an `AsyncBatch`.

    It may be made outside a loop and used from several loops: the connection has its own thread.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        timeout: float = 30.0,
        reconnect_timeout: float = 120.0,
        session: str | None = None,
        curve_server_key: str | None = None,
        curve_public_key: str | None = None,
        curve_secret_key: str | None = None,
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
        self._finalizer = weakref.finalize(self, _end, self._core, self._pushed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, *, cancel: bool = True) -> None:
        """End the connection. Open work is cancelled, with a warning in the log that says how much; with
        `cancel=False` it goes on in the worker, for a later client with this `session`, as long as the worker's
        client timeout allows. Whoever still waits gets ClientClosed. Repeating it does nothing."""
        import asyncio

        await asyncio.to_thread(_end, self._core, self._pushed, cancel=cancel)

    @property
    def session(self) -> str | None:
        """The session's token; None before the first welcome."""
        return self._core.session

    async def connect(self, timeout: float | None = None) -> Welcome:
        """Wait for the worker and return what it says of itself: model, limits, capabilities, weight version."""
        return await arun(calls.connect(self._core, timeout))

    async def submit(
        self,
        groups: Group | Sequence[Group] = (),
        *,
        batch_id: str | None = None,
        step: int | None = None,
        groups_needed: int | None = None,
        min_complete: int | None = None,
        surplus: Surplus = "keep",
        resume: Sequence[Group | Trajectory] = (),
        max_retries: int = 0,
        auto_ack: bool = True,
        timeout: float | None = None,
    ) -> AsyncBatch:
        """Hand groups over and return once the worker has accepted them all.

        The client keeps them until their results are acknowledged, and submits what is open again when the worker
        has restarted. Raises the worker's refusal (nothing was started then), BadRequest for what exceeds the
        worker's limits, Duplicate for ids that are still open here, Timeout or ConnectionLost (the work is then
        cancelled; make new groups to try again).

        step: of your trainer; the worker's metrics of this batch appear under it. Without it the weight version.

        groups_needed: end the batch early, when so many groups are complete, which is with `min_complete` of their
        samples `completed` or `truncated` (all, without it). surplus: what becomes of the rest then: "keep" leaves it
        in the worker, `batch.kept` names it; "return" brings it as `abort_surplus`, with what it has. resume: groups
        of an earlier `batch.kept`, or trajectories that are `resumable`, to go on where they were.
        max_retries: so many times a sample that failed starts again, with a new sample index and under its old id.
        """
        submitted = await arun(
            calls.submit(
                self._core,
                groups,
                batch_id=batch_id,
                step=step,
                groups_needed=groups_needed,
                min_complete=min_complete,
                surplus=surplus,
                max_retries=max_retries,
                resume=resume,
                auto_ack=auto_ack,
                timeout=timeout,
            )
        )
        return AsyncBatch(self._core, submitted, auto_ack, self)

    async def continue_(
        self,
        turn_done: TurnDone,
        *,
        observation: Ids | None = None,
        glue: Ids | None = None,
        max_tokens: int | None = None,
        done: bool = False,
        turn_reward: float | None = None,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Answer a turn of a trajectory in the environment "remote": go on after `observation`, or end it (`done`).

        A repeat is harmless. So is the answer to a turn from before a worker's restart: that trajectory has
        started again, and its turns come again.
        """
        await arun(
            calls.continue_(
                self._core,
                turn_done,
                observation=observation,
                glue=glue,
                max_tokens=max_tokens,
                done=done,
                turn_reward=turn_reward,
                reward=reward,
                rewards=rewards,
                timeout=timeout,
            )
        )

    async def cancel(
        self,
        *,
        trajectory_ids: Sequence[str] = (),
        group_ids: Sequence[str] = (),
        batch_ids: Sequence[str] = (),
        timeout: float | None = None,
    ) -> dict[str, int]:
        """End trajectories with what they have; their records still come, as `abort_client`. Returns counts."""
        return await arun(calls.cancel(self._core, trajectory_ids, group_ids, batch_ids, timeout))

    async def update_weights(
        self,
        path: Path,
        version: int,
        *,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: Literal["abort", "fail"] = "abort",
        digest: str | None = None,
        checksums: Mapping[str, str] | None = None,
        force: bool = False,
        timeout: float = 600.0,
    ) -> WeightUpdate:
        """Make the safetensors at `path` (on the worker's file system) serve as `version`: prepare, then commit.

        mode: what becomes of turns that run at the commit; `drain` lets them end for at most `drain_timeout`
        seconds, then they are aborted or the commit fails (`on_timeout`). digest: refuse unless the weights read
        have it. checksums: file name -> "sha256:hex". force: allow a lower version. timeout: seconds for reading,
        and again for copying, on top of the drain. Whatever is raised, either the old weights serve or the new.

        Keep the path until the next update: after a restart the worker reads it again. A relative one starts from
        this process's working directory.
        """
        return await arun(
            calls.update_weights(
                self._core,
                path,
                version,
                mode=mode,
                drain_timeout=drain_timeout,
                on_timeout=on_timeout,
                digest=digest,
                checksums=checksums,
                force=force,
                timeout=timeout,
            )
        )

    async def push_weights(
        self,
        weights: Weights,
        version: int,
        *,
        directory: Path | None = None,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: Literal["abort", "fail"] = "abort",
        force: bool = False,
        timeout: float = 600.0,
    ) -> WeightUpdate:
        """Make a live torch model serve as `version`: write its weights where the worker reads them, then
        `update_weights`. Needs torch and safetensors here.

        weights: a model, its state dict, or (name, tensor) pairs, under Hugging Face names; what DDP, torch.compile,
        FSDP and activation checkpointing add to names is taken off, a head that is the embedding itself left out.
        directory: that the worker can read too; required of a worker on another machine, else a temporary one.

        Written is a folder of this client in `directory`, which appears when it is whole and goes when the next push
        serves, when the update is refused, and when the client is closed. Raises, beside what `update_weights`
        raises, WeightsInvalid for a tensor that cannot be handed over (a shard, another dtype, an adapter's) and
        OSError; the old weights serve on.
        """
        await self.connect()
        path = await self._pushed.awrite(weights, version, directory)
        with self._pushed.keeping(path):
            return await self.update_weights(
                path,
                version,
                mode=mode,
                drain_timeout=drain_timeout,
                on_timeout=on_timeout,
                force=force,
                timeout=timeout,
            )

    async def prepare_weights(
        self,
        path: Path,
        version: int,
        *,
        update_id: str | None = None,
        checksums: Mapping[str, str] | None = None,
        force: bool = False,
        timeout: float = 600.0,
    ) -> WeightsPrepared:
        """Read and check weights while generation goes on; serve them later by `commit_weights`."""
        return await arun(
            calls.prepare_weights(
                self._core,
                path,
                version,
                update_id=update_id,
                checksums=checksums,
                force=force,
                timeout=timeout,
            )
        )

    async def commit_weights(
        self,
        prepared: WeightsPrepared,
        *,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: Literal["abort", "fail"] = "abort",
        digest: str | None = None,
        timeout: float = 600.0,
    ) -> WeightsCommitted:
        """Make prepared weights serve. Repeating it for weights that serve already is harmless."""
        return await arun(
            calls.commit_weights(
                self._core,
                prepared,
                mode=mode,
                drain_timeout=drain_timeout,
                on_timeout=on_timeout,
                digest=digest,
                timeout=timeout,
            )
        )

    async def abort_weights(self, prepared: WeightsPrepared | str, *, timeout: float | None = None) -> None:
        """Make the worker forget prepared weights (given by the reply or by the update id)."""
        await arun(calls.abort_weights(self._core, prepared, timeout))

    async def score(
        self,
        sequences: Sequence[Ids],
        sampling: Sampling | None = None,
        *,
        sampled: Sequence[Any] | None = None,
        timeout: float = 600.0,
    ) -> Scored:
        """Logprobs of given ids under a law (`rollout.client.sampling(...)`; neutral by default).

        `logprobs[mode][i]` is float32[L_i], entry 0 NaN. sampled: per sequence uint8[L_i], 1 where presence and
        frequency penalties count the id as sampled.
        """
        return await arun(calls.score(self._core, sequences, sampling, sampled, timeout))

    async def status(self, *, timeout: float | None = None) -> WorkerStatus:
        return await arun(calls.status(self._core, timeout))

    async def ping(self, *, timeout: float | None = None) -> Pong:
        return await arun(calls.ping(self._core, timeout))

    async def pause(self, *, timeout: float | None = None) -> None:
        """Launch no engine step until `resume`; everything stays where it is."""
        await arun(calls.pause(self._core, timeout))

    async def resume(self, *, timeout: float | None = None) -> None:
        await arun(calls.resume(self._core, timeout))

    async def drain(self, drain_timeout: float, *, timeout: float | None = None) -> dict[str, int]:
        """Make the worker refuse new work; returns counts when nothing runs or `drain_timeout` seconds passed."""
        return await arun(calls.drain(self._core, drain_timeout, timeout))


def _end(core: Core, pushed: PushedWeights, *, cancel: bool = True) -> None:
    """Not a method: a finalizer that holds its client would keep it alive."""
    core.close(cancel=cancel)
    pushed.close()
