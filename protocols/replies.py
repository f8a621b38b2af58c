"""What the worker sends: one reply per request (same `id`), and events (the `id` of the submit they belong to)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from protocols.base import Many, Value, refuse
from protocols.limits import Limits, ModelInfo
from protocols.records import Failure, Record, Turn
from protocols.scalars import PROTOCOL, Count, Float32, Int32, Int64, LogprobMode, Name, Size, Status, UInt8, Version


class ReplyMessage(Value):
    protocol: Literal[1] = PROTOCOL
    id: str = Field(max_length=256)


class Welcome(ReplyMessage):
    """The answer to `hello`.

    session: token of the session; to be given in the next `hello` after a lost connection.
    resumed: the session asked for was found, and its open work goes on.
    boot_id: changes when the worker process does: commit the last weights again, then resubmit what is open.
    weight_digest: of the weights that serve.
    capabilities: what this worker can do beyond the fixed part of the protocol.
    environments: names that a group may ask for.
    open_trajectories: work of the session that is not acknowledged yet.
    """

    type: Literal["welcome"] = "welcome"
    session: Name
    resumed: bool
    boot_id: Name
    worker_version: str
    model: ModelInfo
    weight_version: Version
    weight_digest: str
    capabilities: Many[str]
    environments: Many[str]
    limits: Limits
    open_trajectories: Many[Name] = ()


class Accepted(ReplyMessage):
    """The answer to `submit`.

    trajectories: of this submit.
    known: of those, how many the worker already had (a repeat).
    """

    type: Literal["accepted"] = "accepted"
    batch_id: Name
    trajectories: Size
    known: Size = 0


class WeightsPrepared(ReplyMessage):
    """The answer to `prepare_weights`: nothing serves yet.

    digest: of names, shapes and bytes in the worker's dtype.
    bytes: of the weights in the worker's dtype.
    load_s: reading and checking.
    """

    type: Literal["weights_prepared"] = "weights_prepared"
    update_id: Name
    version: Version
    digest: str
    bytes: Size
    load_s: float


class WeightsCommitted(ReplyMessage):
    """The answer to `commit_weights`: from here on every sampled token carries this version.

    paused_s: how long no step ran because of this commit.
    """

    type: Literal["weights_committed"] = "weights_committed"
    update_id: Name
    version: Version
    digest: str
    paused_s: float


class Ok(ReplyMessage):
    """The answer to requests that return nothing else.

    detail: counts, such as how many of the ids of a `cancel` were still running.
    """

    type: Literal["ok"] = "ok"
    detail: dict[str, Size] = Field(default_factory=dict)


class Scored(ReplyMessage):
    """The answer to `score`.

    logprobs: for each mode one array per sequence, as long as it, entry 0 NaN (nothing precedes it).
    """

    type: Literal["scored"] = "scored"
    weight_version: Version
    logprobs: dict[LogprobMode, Many[Float32]]


class WorkerStatus(ReplyMessage):
    """The answer to `status`: one look at the worker.

    engine: gauges and counters by name.
    wire: gauges and counters by name. waiting_for_weights: trajectories whose min_version does not serve yet;
        wanted_version: the lowest of those, where there are any.
    environments: of the processes that environments and tools run in, gauges and counters by name.
    """

    type: Literal["worker_status"] = "worker_status"
    state: Literal["starting", "ready", "paused", "updating", "draining", "dead"]
    boot_id: Name
    uptime_s: float
    weight_version: Version
    weight_digest: str
    trajectories_running: Size
    trajectories_waiting: Size
    results_unacknowledged: Size
    sessions: Size
    engine: dict[str, float] = Field(default_factory=dict)
    wire: dict[str, float] = Field(default_factory=dict)
    environments: dict[str, float] = Field(default_factory=dict)

    def __repr__(self) -> str:
        """For a person, in a line; the gauges and counters are there to be asked for by name."""
        wanted, waiting = self.wire.get("wanted_version"), self.wire.get("waiting_for_weights", 0.0)
        weights = "" if wanted is None else f" ({waiting:.0f} for weights {wanted:.0f} or later)"
        return (
            f"WorkerStatus({self.state}, weights {self.weight_version}, {self.trajectories_running} running,"
            f" {self.trajectories_waiting} waiting{weights}, {self.results_unacknowledged} to acknowledge,"
            f" {self.sessions} session(s), up {self.uptime_s:.0f} s)"
        )

    __str__ = __repr__


class Pong(ReplyMessage):
    """The answer to `ping`. With an empty id it answers nothing: the worker looks whether the connection stands."""

    type: Literal["pong"] = "pong"
    boot_id: Name
    weight_version: Version


class ErrorReply(ReplyMessage):
    """The answer to any request that failed.

    id: empty where the id of the message could not be read.
    """

    type: Literal["error"] = "error"
    error: Failure


class TurnDone(ReplyMessage):
    """A turn of a `remote` trajectory ended and waits for `continue`.

    total_len: tokens of the trajectory so far: `expected_len` of the answer.
    token_ids: the turn's sampled ids.
    logprobs: theirs, of the primary mode, finite.
    """

    type: Literal["turn_done"] = "turn_done"
    trajectory_id: Name
    turn: Turn
    total_len: Count
    token_ids: Int32
    logprobs: Float32

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for name, array in (("token_ids", self.token_ids), ("logprobs", self.logprobs)):
            if len(array) != self.turn.length:
                refuse(f"has {len(array)} entries for a turn of {self.turn.length}", f".{name}")
        if not np.isfinite(self.logprobs).all():
            refuse("must be finite", ".logprobs")
        return self


class TrajectoryDone(ReplyMessage):
    """A trajectory ended. To be acknowledged."""

    type: Literal["trajectory_done"] = "trajectory_done"
    record: Record


class GroupDone(ReplyMessage):
    """All trajectories of a group ended, or were kept.

    counts: trajectories by status.
    complete: at least min_complete (without one: all) are `completed` or `truncated`.
    short: so many of its samples can no longer become that, for too many failed or were aborted.
    kept: trajectories that wait for a `resume`.
    """

    type: Literal["group_done"] = "group_done"
    batch_id: Name
    group_id: Name
    counts: dict[Status, Size]
    complete: bool
    short: bool = False
    kept: Size = 0


class BatchDone(ReplyMessage):
    """All trajectories of a batch ended, or were kept.

    counts: trajectories by status.
    wall_s: from accept to the last end.
    cut: trajectories that had not ended when the batch had enough.
    cut_tokens: what those had sampled until then.
    kept: those of them that wait for a `resume`.
    """

    type: Literal["batch_done"] = "batch_done"
    batch_id: Name
    counts: dict[Status, Size]
    wall_s: float
    cut: Size = 0
    cut_tokens: Size = 0
    kept: Many[Name] = ()


class WeightsProgress(ReplyMessage):
    """How far an update is.

    fraction: of the stage.
    """

    type: Literal["weights_progress"] = "weights_progress"
    update_id: Name
    stage: Literal["reading", "checking", "draining", "copying"]
    fraction: Annotated[float, Field(ge=0, le=1)]


class Chunk(ReplyMessage):
    """A piece of a message too large to be sent at once.

    The bytes of a message are those of its frames, header first, one after another.

    id: that of the whole message.
    of: number of the whole message on this connection.
    offset: where the piece begins among the bytes of the whole.
    data: consecutive bytes, in pieces none of which goes across the end of a frame.
    sizes: bytes of every frame; in the first chunk only.
    """

    type: Literal["chunk"] = "chunk"
    of: Size
    offset: Size
    data: Annotated[Many[UInt8], Field(min_length=1)]
    sizes: Int64 | None = None


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

EVENTS = (TurnDone, TrajectoryDone, GroupDone, BatchDone, WeightsProgress, Chunk)


def is_event(message: ReplyMessage) -> bool:
    """Does the send window count this message? A reply in chunks counts too, as its chunks do."""
    return type(message) in EVENTS
