"""A client's calls about trajectories: hand them over, answer their turns, end them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from protocols.fields import Group
from protocols.replies import Ok, TurnDone, Welcome
from protocols.requests import Cancel, Continue, SubmitBatch
from rollout.client.batch import BatchView
from rollout.client.call import Call
from rollout.client.core import Core
from rollout.client.ledger import Item
from rollout.client.limits import check_groups
from rollout.client.resumption import resumption
from rollout.client.trajectory import Trajectory
from rollout.client.values import Ids, instance, int32, mapping, number, several
from rollout.client.waiting import Mailbox, Steps

Surplus = Literal["keep", "return"]

B = TypeVar("B", bound=BatchView)


class WorkCalls(Generic[B]):
    """B: the batch of this face."""

    _core: Core
    _batch: Callable[..., B]

    @Call
    def submit(
        self,
        groups: Group | Sequence[Group] = (),
        *,
        batch_id: str | None = None,
        step: int | None = None,
        groups_needed: int | None = None,
        min_complete: int | None = None,
        surplus: Surplus = "keep",
        resume: Group | Sequence[Group | Trajectory] = (),
        max_retries: int = 0,
        auto_ack: bool = True,
        timeout: float | None = None,
    ) -> Steps[B]:
        """Hand groups over and return, once the worker has accepted them all, a `Batch` (or `AsyncBatch`) to iterate.

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
        resumed, again, partials = resumption(several(resume, "resume"))
        new = several(groups, "groups")
        for i, group in enumerate(new):
            instance(group, Group, f"groups[{i}]")
        message = self._core.message(
            SubmitBatch,
            batch_id=batch_id if batch_id is not None else f"batch-{secrets.token_hex(6)}",
            groups=(*new, *again),
            step=step,
            groups_needed=groups_needed,
            min_complete=min_complete,
            surplus=surplus,
            max_retries=max_retries,
            resume=tuple(name for group in resumed for name in group.trajectory_ids),
            partials=partials,
        )
        welcome: Welcome = yield self._core.greeted(timeout)
        check_groups(message.groups, welcome)
        everything = (*message.groups, *resumed)
        mailbox: Mailbox[Item] = Mailbox(sum(len(group.trajectory_ids) for group in everything))
        yield self._core.submit(message, mailbox, auto_ack, timeout, resumed)
        return self._batch(self, self._core, message.batch_id, everything, mailbox, auto_ack)

    @Call
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
    ) -> Steps[None]:
        """Answer a turn of a trajectory in the environment "remote": go on after `observation`, or end it (`done`).

        A repeat is harmless. So is the answer to a turn from before a worker's restart: that trajectory has
        started again, and its turns come again.
        """
        instance(turn_done, TurnDone, "turn_done")
        message = self._core.message(
            Continue,
            trajectory_id=turn_done.trajectory_id,
            turn=turn_done.turn.index,
            expected_len=turn_done.total_len,
            glue=None if glue is None else int32(glue, "glue"),
            observation=None if observation is None else int32(observation, "observation"),
            max_tokens=max_tokens,
            done=done,
            turn_reward=None if turn_reward is None else number(turn_reward, "turn_reward"),
            reward=None if reward is None else number(reward, "reward"),
            rewards={name: number(value, f"rewards.{name}") for name, value in mapping(rewards, "rewards").items()},
        )
        yield self._core.answer(message, turn_done.id, timeout)

    @Call
    def cancel(
        self,
        *,
        trajectory_ids: Sequence[str] = (),
        group_ids: Sequence[str] = (),
        batch_ids: Sequence[str] = (),
        timeout: float | None = None,
    ) -> Steps[dict[str, int]]:
        """End trajectories with what they have; their records still come, as `abort_client`. Returns counts.

        One id may stand without a list."""
        message = self._core.message(
            Cancel,
            trajectory_ids=several(trajectory_ids, "trajectory_ids"),
            group_ids=several(group_ids, "group_ids"),
            batch_ids=several(batch_ids, "batch_ids"),
        )
        return (yield from self._core.ask(message, Ok, timeout)).detail
