"""What a client sends. Every request gets exactly one reply with the same `id`: its own, or `error`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocols.fields import PROTOCOL, Group, Int32, Name, Reward, Sampling, Seconds, UInt8, Value


class RequestMessage(Value):
    protocol: Literal[1] = PROTOCOL
    id: Name


class Hello(RequestMessage):
    """First on every connection. session: the token of an earlier `welcome`, to go on with that session."""

    type: Literal["hello"] = "hello"
    client: Name
    session: Name | None = None


class SubmitBatch(RequestMessage):
    """Accepted as a whole or refused as a whole. A repeat with equal content is accepted again and runs once.

    groups_needed, min_complete: end the batch early (by capability `early_cut`). resume: go on with kept partials
    (by capability `resume`).
    """

    type: Literal["submit"] = "submit"
    batch_id: Name
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]
    groups_needed: Annotated[int, Field(gt=0)] | None = None
    min_complete: Annotated[int, Field(gt=0)] | None = None
    surplus: Literal["keep", "return"] = "keep"
    resume: tuple[Name, ...] = ()


class Continue(RequestMessage):
    """The trainer's answer to `turn_done` of a trajectory in a `remote` environment.

    turn: index of the turn that is answered. expected_len: tokens of the trajectory after that turn. A repeat of
    the answer already taken is a no-op; anything else that does not fit is `prefix_mismatch`.
    """

    type: Literal["continue"] = "continue"
    trajectory_id: Name
    turn: Annotated[int, Field(ge=0)]
    expected_len: Annotated[int, Field(gt=0)]
    glue: Int32 | None = None
    observation: Int32 | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    done: bool = False
    turn_reward: Reward | None = None
    reward: Reward | None = None
    rewards: dict[str, Reward] = Field(default_factory=dict)


class Cancel(RequestMessage):
    """End trajectories with what they have (`abort_client`); finished and unknown ones are ignored, and counted."""

    type: Literal["cancel"] = "cancel"
    trajectory_ids: tuple[Name, ...] = ()
    group_ids: tuple[Name, ...] = ()
    batch_ids: tuple[Name, ...] = ()


class Ack(RequestMessage):
    """Results taken over by the client: the worker forgets them and their ids are free.

    received_bytes: bytes of all frames of events received on this connection so far; reopens the send window.
    The one request that gets no reply.
    """

    type: Literal["ack"] = "ack"
    trajectory_ids: tuple[Name, ...] = ()
    received_bytes: Annotated[int, Field(ge=0)] = 0


class PrepareWeightsRequest(RequestMessage):
    """Read and check a safetensors file or directory on the worker's file system; generation goes on.

    version must not be below the serving one unless force. checksums: file name -> "sha256:hex".
    """

    type: Literal["prepare_weights"] = "prepare_weights"
    update_id: Name
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: int
    checksums: dict[str, str] | None = None
    force: bool = False


class CommitWeightsRequest(RequestMessage):
    """Make a prepared update serve (decision 10 says what each mode does to running turns).

    digest: refuse unless prepare found this one. drain_timeout_s is required for mode `drain`.
    """

    type: Literal["commit_weights"] = "commit_weights"
    update_id: Name
    version: int
    digest: str | None = None
    mode: Literal["drain", "abort", "keep_kv", "recompute_kv"] = "drain"
    drain_timeout_s: Seconds | None = None
    on_drain_timeout: Literal["abort", "fail"] = "abort"


class AbortWeightsRequest(RequestMessage):
    """Forget a prepared update."""

    type: Literal["abort_weights"] = "abort_weights"
    update_id: Name


class PauseRequest(RequestMessage):
    """Launch no further engine step until `resume`; everything stays where it is."""

    type: Literal["pause"] = "pause"


class ResumeRequest(RequestMessage):
    type: Literal["resume"] = "resume"


class SleepRequest(RequestMessage):
    """Give the device's memory back (by capability `sleep`)."""

    type: Literal["sleep"] = "sleep"
    level: Literal[1, 2] = 1


class WakeRequest(RequestMessage):
    type: Literal["wake"] = "wake"


class Score(RequestMessage):
    """Logprobs of given ids under the law of `sampling`, nothing sampled.

    sampled: per sequence uint8[L], 1 where presence and frequency penalties count the id as sampled.
    """

    type: Literal["score"] = "score"
    sequences: Annotated[tuple[Int32, ...], Field(min_length=1)]
    sampled: tuple[UInt8, ...] | None = None
    sampling: Sampling = Sampling()


class StatusRequest(RequestMessage):
    type: Literal["status"] = "status"


class Drain(RequestMessage):
    """Refuse new work, let running work end, answer when nothing runs or `timeout_s` has passed."""

    type: Literal["drain"] = "drain"
    timeout_s: Seconds


class Ping(RequestMessage):
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

__all__ = [
    "AbortWeightsRequest",
    "Ack",
    "Cancel",
    "CommitWeightsRequest",
    "Continue",
    "Drain",
    "Hello",
    "PauseRequest",
    "Ping",
    "PrepareWeightsRequest",
    "Request",
    "RequestMessage",
    "ResumeRequest",
    "Score",
    "SleepRequest",
    "StatusRequest",
    "SubmitBatch",
    "WakeRequest",
]
