"""What a client sends. Every request gets exactly one reply with the same `id`: its own, or `error`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from protocols.base import Many, Received, Value, limited, refuse
from protocols.records import Record
from protocols.scalars import PROTOCOL, Count, Int32, Name, Positive, Reward, Seconds, Size, UInt8, Version
from protocols.work import Group, Sampling


class RequestMessage(Value):
    protocol: Literal[1] = PROTOCOL
    id: Name


class Hello(RequestMessage):
    """First on every connection.

    client: a name for the log.
    session: the token of an earlier `welcome`, to go on with that session.
    """

    type: Literal["hello"] = "hello"
    client: Name
    session: Name | None = None


class SubmitBatch(RequestMessage):
    """Accepted as a whole or refused as a whole. A repeat with equal content is accepted again and runs once.

    groups_needed: end the batch early, when so many groups are complete (capability `early_cut`). Nil, and no
        min_complete: never; else all of them. 0: at once, so that everything is left over; a batch that had enough
        when its worker restarted is submitted again so.
    min_complete: `completed` and `truncated` samples that make a group complete; nil means all of its samples.
    surplus: what happens to the rest then. `keep`: they stay in the worker, with their environment, for a later
        `resume`, and have no record until then; `return`: they end as `abort_surplus` with what they have.
    max_retries: a sample that failed starts again so many times, each time with a new sample index. Its id has one
        record all the same: that of the last attempt.
    resume: kept trajectories that go on, in this batch, in groups of the ids they had (capability `resume`).
    partials: returned records of trajectories that go on: each names by trajectory_id one that the groups of this
        submit hold, of the same group, prompt, law, seed and sample index (capability `resume`).
    step: the trainer's own count of rounds, under which the worker's metrics of this batch appear; nil takes the
        weight version that serves at accept.
    """

    type: Literal["submit"] = "submit"
    batch_id: Name
    groups: Annotated[Many[Group], limited("max_groups")] = ()
    groups_needed: Count | None = None
    min_complete: Positive | None = None
    surplus: Literal["keep", "return"] = "keep"
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    resume: Annotated[Many[Name], limited("max_trajectories")] = ()
    partials: Annotated[Many[Record], limited("max_trajectories")] = ()
    step: Size | None = None

    @model_validator(mode="after")
    def _ids_are_unique(self, info: ValidationInfo) -> Self:
        if not self.groups and not self.resume:
            refuse("must not be empty where nothing is resumed", ".groups")
        if len(set(self.resume)) < len(self.resume):
            refuse("names a trajectory twice", ".resume")
        if self.groups_needed is not None and not self.resume and self.groups_needed > len(self.groups):
            refuse(f"is more than the {len(self.groups)} groups there are", ".groups_needed")
        groups: set[str] = set()
        trajectories: set[str] = set()
        count = 0
        for i, group in enumerate(self.groups):
            if group.id in groups:
                refuse("names an earlier group", f".groups[{i}].id")
            groups.add(group.id)
            trajectories.update(group.trajectory_ids)
            count += len(group.trajectory_ids)
            if len(trajectories) < count:
                refuse("names a trajectory of an earlier group", f".groups[{i}].trajectory_ids")
        if isinstance(info.context, Received) and count > info.context.limits.max_trajectories:
            refuse(f"{count} trajectories are more than max_trajectories, {info.context.limits.max_trajectories}")
        return self


class Continue(RequestMessage):
    """The trainer's answer to `turn_done` of a trajectory in a `remote` environment.

    A repeat of the answer already taken is a no-op; anything else that does not fit is `prefix_mismatch`.

    turn: index of the turn that is answered.
    expected_len: tokens of the trajectory after that turn.
    glue: template tokens, appended first.
    observation: appended after the glue.
    max_tokens: of the next turn; nil keeps `sampling.max_tokens`.
    done: end the trajectory (`env_done`). Nothing is appended then: glue, observation and max_tokens are refused.
    turn_reward: of the turn that is answered.
    reward: of the trajectory; only with done.
    rewards: named parts of it; only with done.
    """

    type: Literal["continue"] = "continue"
    trajectory_id: Name
    turn: Count
    expected_len: Positive
    glue: Int32 | None = None
    observation: Int32 | None = None
    max_tokens: Positive | None = None
    done: bool = False
    turn_reward: Reward | None = None
    reward: Reward | None = None
    rewards: dict[Name, Reward] = Field(default_factory=dict, max_length=256)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.done:
            for name in ("glue", "observation", "max_tokens"):
                if getattr(self, name) is not None:
                    refuse("opens a further turn, but done is set", f".{name}")
        elif self.reward is not None or self.rewards:
            refuse("is the trajectory's and comes with done", ".reward" if self.reward is not None else ".rewards")
        return self


class Cancel(RequestMessage):
    """End trajectories with what they have (`abort_client`). Finished and unknown ones are ignored, and counted."""

    type: Literal["cancel"] = "cancel"
    trajectory_ids: Annotated[Many[Name], limited("max_trajectories")] = ()
    group_ids: Annotated[Many[Name], limited("max_trajectories")] = ()
    batch_ids: Annotated[Many[Name], limited("max_trajectories")] = ()


class Ack(RequestMessage):
    """Results taken over by the client: the worker forgets them and their ids are free.

    The one request that gets no reply.

    trajectory_ids: ended trajectories; others are ignored.
    received_bytes: of all frames of events and chunks received on this connection so far; reopens the send window.
    """

    type: Literal["ack"] = "ack"
    trajectory_ids: Annotated[Many[Name], limited("max_trajectories")] = ()
    received_bytes: Size = 0


class PrepareWeightsRequest(RequestMessage):
    """Read and check a safetensors file or directory on the worker's file system; generation goes on.

    update_id: names the update in `commit_weights`.
    path: never deleted by the worker.
    version: must not be below the serving one unless force.
    checksums: file name to `sha256:` and hex.
    force: go back to an older version.
    """

    type: Literal["prepare_weights"] = "prepare_weights"
    update_id: Name
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Version
    checksums: Annotated[dict[str, str], Field(max_length=4096)] | None = None
    force: bool = False


class CommitWeightsRequest(RequestMessage):
    """Make a prepared update serve.

    digest: refuse unless prepare found this one.
    mode: `drain`: no new turn starts, running turns end first. `abort`: running turns end as they are. `keep_kv`:
        they go on over their old KV (capability). `recompute_kv`: they go on over KV of the new weights (capability).
    drain_timeout_s: required by mode `drain`.
    on_drain_timeout: `abort` the turns that still run, or `fail` the commit with the old weights serving.
    """

    type: Literal["commit_weights"] = "commit_weights"
    update_id: Name
    version: Version
    digest: str | None = None
    mode: Literal["drain", "abort", "keep_kv", "recompute_kv"] = "drain"
    drain_timeout_s: Seconds | None = None
    on_drain_timeout: Literal["abort", "fail"] = "abort"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.mode == "drain" and self.drain_timeout_s is None:
            refuse('is required by mode "drain"', ".drain_timeout_s")
        return self


class AbortWeightsRequest(RequestMessage):
    """Forget a prepared update."""

    type: Literal["abort_weights"] = "abort_weights"
    update_id: Name


class PauseRequest(RequestMessage):
    """Launch no further engine step until `resume`; everything stays where it is."""

    type: Literal["pause"] = "pause"


class ResumeRequest(RequestMessage):
    """Go on after `pause`, and take new work again after `drain`."""

    type: Literal["resume"] = "resume"


class SleepRequest(RequestMessage):
    """Give the device's memory back (capability `sleep`)."""

    type: Literal["sleep"] = "sleep"
    level: Annotated[int, Field(ge=1, le=2)] = 1


class WakeRequest(RequestMessage):
    """Take the device's memory again (capability `sleep`)."""

    type: Literal["wake"] = "wake"


class Score(RequestMessage):
    """Logprobs of given ids under the law of `sampling`, nothing sampled.

    sequences: none empty.
    sampled: per sequence as long as it, 1 where presence and frequency penalties count the id as sampled.
    """

    type: Literal["score"] = "score"
    sequences: Annotated[Many[Int32], Field(min_length=1), limited("max_trajectories")]
    sampled: Annotated[Many[UInt8], limited("max_trajectories")] | None = None
    sampling: Sampling = Field(default_factory=Sampling)

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for i, ids in enumerate(self.sequences):
            if len(ids) == 0:
                refuse("must not be empty", f".sequences[{i}]")
        if self.sampled is None:
            return self
        if len(self.sampled) != len(self.sequences):
            refuse(f"has {len(self.sampled)} entries for {len(self.sequences)} sequences", ".sampled")
        for i, (ids, sampled) in enumerate(zip(self.sequences, self.sampled, strict=True)):
            if len(ids) != len(sampled):
                refuse(f"has {len(sampled)} entries for {len(ids)} ids", f".sampled[{i}]")
            if sampled.max() > 1:
                refuse("must be 0 or 1", f".sampled[{i}]")
        return self


class StatusRequest(RequestMessage):
    """Ask for one look at the worker."""

    type: Literal["status"] = "status"


class Drain(RequestMessage):
    """Refuse new work until `resume`, let running work end, answer when nothing runs or the time is over."""

    type: Literal["drain"] = "drain"
    timeout_s: Seconds


class Ping(RequestMessage):
    """Ask for a `pong`, which waits behind no more than the send window."""

    type: Literal["ping"] = "ping"


Request = Annotated[
    Hello
    | SubmitBatch
    | Continue
    | Cancel
    | Ack
    | PrepareWeightsRequest
    | CommitWeightsRequest
    | AbortWeightsRequest
    | PauseRequest
    | ResumeRequest
    | SleepRequest
    | WakeRequest
    | Score
    | StatusRequest
    | Drain
    | Ping,
    Field(discriminator="type"),
]
