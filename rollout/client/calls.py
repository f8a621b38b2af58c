"""Every call of a client as a procedure (see waiting.py), shared by the synchronous and the asyncio face."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from protocols.errors import BadRequest, Internal, RolloutError
from protocols.fields import Group, Sampling
from protocols.replies import (
    Ok,
    Pong,
    ReplyMessage,
    Scored,
    TurnDone,
    WeightsCommitted,
    WeightsPrepared,
    Welcome,
    WorkerStatus,
)
from protocols.requests import (
    AbortWeightsRequest,
    Cancel,
    CommitWeightsRequest,
    Continue,
    Drain,
    PauseRequest,
    Ping,
    PrepareWeightsRequest,
    RequestMessage,
    ResumeRequest,
    Score,
    StatusRequest,
    SubmitBatch,
)
from rollout.client.core import Core
from rollout.client.groups import Ids, checked, int32
from rollout.client.ledger import Item
from rollout.client.limits import check_groups
from rollout.client.resumption import resumption
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import Mailbox, Steps

Surplus = Literal["keep", "return"]
Mode = Literal["drain", "abort", "keep_kv", "recompute_kv"]
ATTEMPTS = 3
"""Of an update whose worker restarts in the middle: more often it is the update that it dies of."""

R = TypeVar("R", bound=ReplyMessage)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What `update_weights` did. digest: of the weights that serve now. paused_s: no engine step ran that long."""

    version: int
    digest: str
    update_id: str
    bytes: int
    load_s: float
    paused_s: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted batch. groups: those submitted and those resumed."""

    batch_id: str
    groups: tuple[Group, ...]
    mailbox: Mailbox[Item]


def submit(
    core: Core,
    groups: Group | Sequence[Group],
    *,
    batch_id: str | None,
    step: int | None,
    groups_needed: int | None,
    min_complete: int | None,
    surplus: Surplus,
    max_retries: int,
    resume: Sequence[Group | Trajectory],
    auto_ack: bool,
    timeout: float | None,
) -> Steps[Submitted]:
    resumed, again, partials = resumption(resume)
    message = checked(
        SubmitBatch,
        id=core.new_id(),
        batch_id=batch_id if batch_id is not None else f"batch-{secrets.token_hex(6)}",
        groups=(*((groups,) if isinstance(groups, Group) else groups), *again),
        step=None if step is None else int(step),
        groups_needed=groups_needed,
        min_complete=min_complete,
        surplus=surplus,
        max_retries=max_retries,
        resume=tuple(name for group in resumed for name in group.trajectory_ids),
        partials=partials,
    )
    wait = core.timeout if timeout is None else timeout
    welcome: Welcome = yield core.greeted(wait)
    check_groups(message.groups, welcome)
    everything = (*message.groups, *resumed)
    mailbox: Mailbox[Item] = Mailbox(sum(len(group.trajectory_ids) for group in everything))
    yield core.submit(message, mailbox, auto_ack, wait, resumed)
    return Submitted(message.batch_id, everything, mailbox)


def continue_(
    core: Core,
    turn_done: TurnDone,
    *,
    observation: Ids | None,
    glue: Ids | None,
    max_tokens: int | None,
    done: bool,
    turn_reward: float | None,
    reward: float | None,
    rewards: Mapping[str, float] | None,
    timeout: float | None,
) -> Steps[None]:
    message = checked(
        Continue,
        id=core.new_id(),
        trajectory_id=turn_done.trajectory_id,
        turn=turn_done.turn.index,
        expected_len=turn_done.total_len,
        glue=None if glue is None else int32(glue, "glue"),
        observation=None if observation is None else int32(observation, "observation"),
        max_tokens=max_tokens,
        done=done,
        turn_reward=None if turn_reward is None else float(turn_reward),
        reward=None if reward is None else float(reward),
        rewards={name: float(value) for name, value in (rewards or {}).items()},
    )
    yield core.answer(message, turn_done.id, core.timeout if timeout is None else timeout)


def cancel(
    core: Core, trajectory_ids: Sequence[str], group_ids: Sequence[str], batch_ids: Sequence[str], timeout: float | None
) -> Steps[dict[str, int]]:
    message = checked(
        Cancel,
        id=core.new_id(),
        trajectory_ids=tuple(trajectory_ids),
        group_ids=tuple(group_ids),
        batch_ids=tuple(batch_ids),
    )
    reply = yield from _call(core, message, Ok, timeout)
    return reply.detail


def prepare_weights(
    core: Core,
    path: str | os.PathLike[str],
    version: int,
    *,
    update_id: str | None,
    checksums: Mapping[str, str] | None,
    force: bool,
    timeout: float,
) -> Steps[WeightsPrepared]:
    if not isinstance(path, str | os.PathLike):
        raise BadRequest(f"must be a path, not {type(path).__name__}: a live model goes to push_weights", field="path")
    message = checked(
        PrepareWeightsRequest,
        id=core.new_id(),
        update_id=update_id or f"update-{secrets.token_hex(6)}",
        path=os.path.abspath(path),  # the worker's working directory is another
        version=version,
        checksums=None if checksums is None else dict(checksums),
        force=force,
    )
    return (yield from _call(core, message, WeightsPrepared, timeout))


def commit_weights(
    core: Core,
    prepared: WeightsPrepared,
    *,
    mode: Mode,
    drain_timeout: float,
    on_timeout: Literal["abort", "fail"],
    digest: str | None,
    timeout: float,
) -> Steps[WeightsCommitted]:
    message = checked(
        CommitWeightsRequest,
        id=core.new_id(),
        update_id=prepared.update_id,
        version=prepared.version,
        digest=digest or prepared.digest,
        mode=mode,
        drain_timeout_s=float(drain_timeout) if mode == "drain" else None,
        on_drain_timeout=on_timeout,
    )
    return (yield from _call(core, message, WeightsCommitted, timeout + (drain_timeout if mode == "drain" else 0.0)))


def update_weights(
    core: Core,
    path: str | os.PathLike[str],
    version: int,
    *,
    mode: Mode,
    drain_timeout: float,
    on_timeout: Literal["abort", "fail"],
    digest: str | None,
    checksums: Mapping[str, str] | None,
    force: bool,
    timeout: float,
) -> Steps[WeightUpdate]:
    """Prepare, then commit. A worker that restarted in between has forgotten the prepared bytes: then both again."""
    update_id = f"update-{secrets.token_hex(6)}"
    for attempt in range(1, ATTEMPTS + 1):
        boot_id = core.boot_id
        prepared = yield from prepare_weights(
            core, path, version, update_id=update_id, checksums=checksums, force=force, timeout=timeout
        )
        try:
            committed = yield from commit_weights(
                core,
                prepared,
                mode=mode,
                drain_timeout=drain_timeout,
                on_timeout=on_timeout,
                digest=digest,
                timeout=timeout,
            )
        except RolloutError:
            if core.boot_id != boot_id and attempt < ATTEMPTS:
                continue
            core.forget_update(update_id)
            raise
        return WeightUpdate(
            version=committed.version,
            digest=committed.digest,
            update_id=update_id,
            bytes=prepared.bytes,
            load_s=prepared.load_s,
            paused_s=committed.paused_s,
        )
    raise AssertionError("the last attempt returns or raises")


def abort_weights(core: Core, prepared: WeightsPrepared | str, timeout: float | None) -> Steps[None]:
    update_id = prepared if isinstance(prepared, str) else prepared.update_id
    yield from _call(core, checked(AbortWeightsRequest, id=core.new_id(), update_id=update_id), Ok, timeout)


def score(
    core: Core,
    sequences: Sequence[Ids],
    law: Sampling | None,
    sampled: Sequence[Any] | None,
    timeout: float | None,
) -> Steps[Scored]:
    arrays = tuple(int32(ids, f"sequences[{i}]") for i, ids in enumerate(sequences))
    message = checked(
        Score,
        id=core.new_id(),
        sequences=arrays,
        sampled=None if sampled is None else tuple(np.asarray(mask, np.uint8) for mask in sampled),
        sampling=law or Sampling(),
    )
    reply = yield from _call(core, message, Scored, timeout)
    for mode, rows in reply.logprobs.items():
        if [len(row) for row in rows] != [len(ids) for ids in arrays]:
            raise Internal(f"the worker's {mode} logprobs do not have the lengths of the sequences")
    return reply


def status(core: Core, timeout: float | None) -> Steps[WorkerStatus]:
    return (yield from _call(core, checked(StatusRequest, id=core.new_id()), WorkerStatus, timeout))


def ping(core: Core, timeout: float | None) -> Steps[Pong]:
    return (yield from _call(core, checked(Ping, id=core.new_id()), Pong, timeout))


def pause(core: Core, timeout: float | None) -> Steps[None]:
    yield from _call(core, checked(PauseRequest, id=core.new_id()), Ok, timeout)


def resume(core: Core, timeout: float | None) -> Steps[None]:
    yield from _call(core, checked(ResumeRequest, id=core.new_id()), Ok, timeout)


def drain(core: Core, drain_timeout: float, timeout: float | None) -> Steps[dict[str, int]]:
    message = checked(Drain, id=core.new_id(), timeout_s=float(drain_timeout))
    reply = yield from _call(core, message, Ok, (core.timeout if timeout is None else timeout) + drain_timeout)
    return reply.detail


def connect(core: Core, timeout: float | None) -> Steps[Welcome]:
    welcome: Welcome = yield core.greeted(core.timeout if timeout is None else timeout)
    return welcome


def _call(core: Core, message: RequestMessage, expected: type[R], timeout: float | None) -> Steps[R]:
    reply = yield core.request(message, core.timeout if timeout is None else timeout)
    if not isinstance(reply, expected):
        raise Internal(f"the worker answered {message.id} with {reply.type!r}, not {expected.__name__}")
    return reply
