"""The synchronous client."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from protocols.fields import Group, Sampling
from protocols.replies import Pong, Scored, TurnDone, WeightsCommitted, WeightsPrepared, Welcome, WorkerStatus
from rollout.client import calls
from rollout.client.batch import Batch
from rollout.client.calls import Mode, Surplus, WeightUpdate
from rollout.client.core import Core
from rollout.client.groups import GroupMaker, Ids
from rollout.client.link import Curve
from rollout.client.push import PushedWeights
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import run

if TYPE_CHECKING:
    from rollout.client.push import Weights

Path = str | os.PathLike[str]


class RolloutClient(GroupMaker):
    """A trainer's connection to one rollout worker. Any number of threads may use it.

    address: `tcp://host:port` or `ipc://path`. timeout: seconds that a call waits for its reply unless it says
    otherwise, and after which a worker that neither sends results nor answers pings counts as gone.
    reconnect_timeout: seconds without any worker after which iteration raises ConnectionLost. session: the
    `session` of an earlier client, to go on with its open work. The curve keys are Z85 text (40 characters); with
    a server key alone, a key pair is made up.

    The client connects in the background; `connect`, or any call, waits for the worker. Every call raises an error
    of `protocols.errors`: `Timeout` when a connected worker does not reply in time, `ConnectionLost` when there is
    none, `ClientClosed` after `close` or in a forked child.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, cancel: bool = True) -> None:
        """End the connection. Open work is cancelled, with a warning in the log that says how much; with
        `cancel=False` it goes on in the worker, for a later client with this `session`, as long as the worker's
        client timeout allows. Whoever still waits gets ClientClosed. Repeating it does nothing."""
        _end(self._core, self._pushed, cancel=cancel)

    @property
    def session(self) -> str | None:
        """The session's token; None before the first welcome."""
        return self._core.session

    def connect(self, timeout: float | None = None) -> Welcome:
        """Wait for the worker and return what it says of itself: model, limits, capabilities, weight version."""
        return run(calls.connect(self._core, timeout))

    def submit(
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
    ) -> Batch:
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
        submitted = run(
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
        return Batch(self._core, submitted, auto_ack, self)

    def continue_(
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
        run(
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

    def cancel(
        self,
        *,
        trajectory_ids: Sequence[str] = (),
        group_ids: Sequence[str] = (),
        batch_ids: Sequence[str] = (),
        timeout: float | None = None,
    ) -> dict[str, int]:
        """End trajectories with what they have; their records still come, as `abort_client`. Returns counts."""
        return run(calls.cancel(self._core, trajectory_ids, group_ids, batch_ids, timeout))

    def update_weights(
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
        return run(
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

    def push_weights(
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
        self.connect()
        path = self._pushed.write(weights, version, directory)
        with self._pushed.keeping(path):
            return self.update_weights(
                path,
                version,
                mode=mode,
                drain_timeout=drain_timeout,
                on_timeout=on_timeout,
                force=force,
                timeout=timeout,
            )

    def prepare_weights(
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
        return run(
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

    def commit_weights(
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
        return run(
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

    def abort_weights(self, prepared: WeightsPrepared | str, *, timeout: float | None = None) -> None:
        """Make the worker forget prepared weights (given by the reply or by the update id)."""
        run(calls.abort_weights(self._core, prepared, timeout))

    def score(
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
        return run(calls.score(self._core, sequences, sampling, sampled, timeout))

    def status(self, *, timeout: float | None = None) -> WorkerStatus:
        return run(calls.status(self._core, timeout))

    def ping(self, *, timeout: float | None = None) -> Pong:
        return run(calls.ping(self._core, timeout))

    def pause(self, *, timeout: float | None = None) -> None:
        """Launch no engine step until `resume`; everything stays where it is."""
        run(calls.pause(self._core, timeout))

    def resume(self, *, timeout: float | None = None) -> None:
        run(calls.resume(self._core, timeout))

    def drain(self, drain_timeout: float, *, timeout: float | None = None) -> dict[str, int]:
        """Make the worker refuse new work; returns counts when nothing runs or `drain_timeout` seconds passed."""
        return run(calls.drain(self._core, drain_timeout, timeout))


def _end(core: Core, pushed: PushedWeights, *, cancel: bool = True) -> None:
    """Not a method: a finalizer that holds its client would keep it alive."""
    core.close(cancel=cancel)
    pushed.close()
