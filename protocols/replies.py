"""What the worker sends: one reply per request (same `id`), and events (the `id` of the submit they belong to)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from protocols.fields import (
    PROTOCOL,
    Failure,
    Float32,
    Int32,
    Limits,
    LogprobMode,
    ModelInfo,
    Name,
    Record,
    Status,
    Turn,
    Value,
)


class ReplyMessage(Value):
    protocol: Literal[1] = PROTOCOL
    id: str = Field(max_length=256)
    """Empty in an `error` about a message whose own id could not be read."""


class Welcome(ReplyMessage):
    """boot_id changes when the worker process does: re-commit the last weights, then resubmit what is open.

    resumed: the session asked for was found, and its open work goes on. open_trajectories: that work.
    """

    type: Literal["welcome"] = "welcome"
    session: Name
    resumed: bool
    boot_id: Name
    worker_version: str
    model: ModelInfo
    weight_version: int
    weight_digest: str
    capabilities: tuple[str, ...]
    environments: tuple[str, ...]
    limits: Limits
    open_trajectories: tuple[Name, ...] = ()


class Accepted(ReplyMessage):
    """known: trajectories of this submit that the worker already had (a repeat)."""

    type: Literal["accepted"] = "accepted"
    batch_id: Name
    trajectories: int
    known: int = 0


class WeightsPrepared(ReplyMessage):
    type: Literal["weights_prepared"] = "weights_prepared"
    update_id: Name
    version: int
    digest: str
    bytes: int
    load_s: float


class WeightsCommitted(ReplyMessage):
    """paused_s: how long no step ran because of this commit."""

    type: Literal["weights_committed"] = "weights_committed"
    update_id: Name
    version: int
    digest: str
    paused_s: float


class Ok(ReplyMessage):
    """detail: counts, such as how many of the ids of a `cancel` were still running."""

    type: Literal["ok"] = "ok"
    detail: dict[str, int] = Field(default_factory=dict)


class Scored(ReplyMessage):
    """logprobs[mode][i]: float32[L_i] of sequence i, entry 0 NaN (nothing precedes it)."""

    type: Literal["scored"] = "scored"
    weight_version: int
    logprobs: dict[LogprobMode, tuple[Float32, ...]]


class WorkerStatus(ReplyMessage):
    """One look at the worker. engine, wire: gauges and counters by name (docs/metrics.md)."""

    type: Literal["worker_status"] = "worker_status"
    state: Literal["starting", "ready", "paused", "updating", "draining", "dead"]
    boot_id: Name
    uptime_s: float
    weight_version: int
    weight_digest: str
    trajectories_running: int
    trajectories_waiting: int
    results_unacknowledged: int
    sessions: int
    engine: dict[str, float] = Field(default_factory=dict)
    wire: dict[str, float] = Field(default_factory=dict)


class Pong(ReplyMessage):
    type: Literal["pong"] = "pong"
    boot_id: Name
    weight_version: int


class ErrorReply(ReplyMessage):
    type: Literal["error"] = "error"
    error: Failure


class TurnDone(ReplyMessage):
    """A turn of a `remote` trajectory ended and waits for `continue`; token_ids are the turn's sampled ids."""

    type: Literal["turn_done"] = "turn_done"
    trajectory_id: Name
    turn: Turn
    total_len: int
    token_ids: Int32
    logprobs: Float32


class TrajectoryDone(ReplyMessage):
    type: Literal["trajectory_done"] = "trajectory_done"
    record: Record


class GroupDone(ReplyMessage):
    """All trajectories of a group ended. complete: each is `completed` or `truncated`."""

    type: Literal["group_done"] = "group_done"
    batch_id: Name
    group_id: Name
    counts: dict[Status, int]
    complete: bool


class BatchDone(ReplyMessage):
    type: Literal["batch_done"] = "batch_done"
    batch_id: Name
    counts: dict[Status, int]
    wall_s: float


class WeightsProgress(ReplyMessage):
    type: Literal["weights_progress"] = "weights_progress"
    update_id: Name
    stage: Literal["reading", "checking", "draining", "copying"]
    fraction: float


class Chunk(ReplyMessage):
    """One piece of a blob too large for one frame: bytes [offset, offset + len(data)) of blob `blob` of event `of`.

    The event's header came first and names the blob's full size; the event is complete with its last chunk.
    """

    type: Literal["chunk"] = "chunk"
    of: int
    blob: int
    offset: int
    data: Annotated[Any, Field(exclude=True)] = None


Reply = Annotated[
    Welcome
    | Accepted
    | WeightsPrepared
    | WeightsCommitted
    | Ok
    | Scored
    | WorkerStatus
    | Pong
    | ErrorReply
    | TurnDone
    | TrajectoryDone
    | GroupDone
    | BatchDone
    | WeightsProgress
    | Chunk,
    Field(discriminator="type"),
]
