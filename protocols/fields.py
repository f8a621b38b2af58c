"""Value types shared by the messages: arrays, sampling, limits, the trajectory's parts.

An array travels as a blob of its own behind the msgpack header (see codec.py); in a message it is a numpy array
whose dtype and number of dimensions the field fixes. Received arrays are read-only views of the received frame.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, model_validator

from protocols.base import ArraySpec, Many, Opaque, Value, limited, readable, refuse

PROTOCOL: Final = 1


Int32 = Annotated[npt.NDArray[np.int32], ArraySpec("<i4")]
Int32Matrix = Annotated[npt.NDArray[np.int32], ArraySpec("<i4", 2)]
Int64 = Annotated[npt.NDArray[np.int64], ArraySpec("<i8")]
Int64Matrix = Annotated[npt.NDArray[np.int64], ArraySpec("<i8", 2)]
UInt8 = Annotated[npt.NDArray[np.uint8], ArraySpec("|u1")]
Float32 = Annotated[npt.NDArray[np.float32], ArraySpec("<f4")]
Float32Matrix = Annotated[npt.NDArray[np.float32], ArraySpec("<f4", 2)]

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""An id or a name: of a message, session, batch, group, trajectory, update, environment."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Version = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LogprobMode = Literal["processed", "temperature", "raw"]
Reward = Annotated[float, Field(allow_inf_nan=False)]

# What an entry of `source` says about its token.
SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_PREFIX = range(5)

TurnReason = Literal[
    "stop",
    "tool_calls",
    "length",
    "context_overflow",
    "turn_deadline",
    "abort_client",
    "abort_weight_update",
    "error",
]
TrajectoryReason = Literal[
    "env_done",
    "max_turns",
    "max_total_tokens",
    "context_overflow",
    "length",
    "tool_deadline",
    "trajectory_deadline",
    "stop",
    "abort_client",
    "abort_surplus",
    "abort_stale",
    "abort_shutdown",
    "abort_weight_update",
    "env_error",
    "numerical_error",
    "error",
]
Status = Literal["completed", "truncated", "aborted", "failed"]
STATUS_OF: Final[dict[TrajectoryReason, Status]] = {
    "env_done": "completed",
    "max_turns": "completed",
    "stop": "completed",
    "length": "truncated",
    "max_total_tokens": "truncated",
    "context_overflow": "truncated",
    "tool_deadline": "truncated",
    "trajectory_deadline": "truncated",
    "abort_client": "aborted",
    "abort_surplus": "aborted",
    "abort_stale": "aborted",
    "abort_shutdown": "aborted",
    "abort_weight_update": "aborted",
    "env_error": "failed",
    "numerical_error": "failed",
    "error": "failed",
}
"""The one table from why a trajectory ended to what that makes of it."""
Purpose = Literal["train", "eval"]


class Sampling(Value):
    """The law of a turn. Defaults are neutral; nothing but the EOS list comes from the checkpoint.

    max_tokens: sampled tokens of one turn; None fills up to the context limit.
    bias_ids, bias_values: logit bias as two arrays of one length (int map keys do not survive msgpack).
    seed: drawn by the worker when None; the reply echoes what was used.
    stop: strings, matched over the text of the sampled tokens; stop_ids add to the checkpoint's EOS list.
    logprobs: which logprobs come back, the primary one first.
    """

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_ids: Int32 | None = None
    bias_ids: Int32 | None = None
    bias_values: Float32 | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    max_tokens: Positive | None = None
    stop_ids: Annotated[Many[TokenId], Field(max_length=64)] = ()
    stop: Annotated[Many[Annotated[str, StringConstraints(min_length=1, max_length=1024)]], Field(max_length=16)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[Many[LogprobMode], Field(min_length=1, max_length=3)] = ("processed",)
    top_logprobs: Annotated[int, Field(ge=0, le=64)] = 0
    prompt_logprobs: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.bias_ids is None) != (self.bias_values is None):
            refuse("bias_ids and bias_values come together", ".bias_values")
        if self.bias_ids is not None and self.bias_values is not None:
            if len(self.bias_ids) != len(self.bias_values):
                refuse(f"has {len(self.bias_values)} values for {len(self.bias_ids)} bias_ids", ".bias_values")
            if not np.isfinite(self.bias_values).all():
                refuse("must be finite", ".bias_values")
        if len(set(self.logprobs)) < len(self.logprobs):
            refuse("names a mode twice", ".logprobs")
        return self


class Budget(Value):
    """Where a trajectory ends whatever its environment says. None means no limit of its own.

    max_total_tokens counts every token of the trajectory, prompt and observations included; None is the
    worker's context limit. on_length: does a turn cut by `max_tokens` end the trajectory? None asks the
    environment (scripted: continue; others: end).
    """

    max_turns: Positive | None = None
    max_total_tokens: Positive | None = None
    turn_deadline_s: Seconds | None = None
    tool_deadline_s: Seconds | None = None
    trajectory_deadline_s: Seconds | None = None
    on_length: Literal["end", "continue"] | None = None


class ScriptedTurn(Value):
    """What follows one sampled turn. glue: template tokens that end the turn and open the next one."""

    glue: Int32 | None = None
    observation: Int32 | None = None
    max_tokens: Positive | None = None
    """Budget of the turn that this observation opens; None keeps `Sampling.max_tokens`."""


class Environment(Value):
    """Which environment answers the model.

    name "scripted": `script[k]` follows turn k, the trajectory ends with the turn after the last entry (an empty
    script is a single turn). "remote": the trainer answers each `turn_done` with `continue`. Any other name was
    registered when the worker started; it gets `config`, which the wire does not interpret.
    """

    name: Name = "scripted"
    script: Many[ScriptedTurn] = ()
    config: Opaque = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.script and self.name != "scripted":
            refuse('belongs to the environment "scripted"', ".script")
        return self


class Group(Value):
    """n samples of one prompt; n is the number of trajectory ids.

    trajectory_ids: the caller's, unique within the session. sample_indices: the noise key of each sample,
    0..n-1 when None. prompt_source: uint8[L] when the prompt already holds sampled tokens (a resumed record);
    None means all of it is prompt. metadata: opaque, bounded, echoed in every record.
    min_version: wait until weights of at least this version serve. max_staleness: end the trajectory as
    `abort_stale` rather than let its oldest token fall further behind the serving version.
    """

    id: Name
    prompt: Int32
    trajectory_ids: Annotated[Many[Name], Field(min_length=1), limited("max_trajectories")]
    sampling: Sampling = Sampling()
    environment: Environment = Environment()
    budget: Budget = Budget()
    sample_indices: Many[Annotated[int, Field(ge=0, lt=2**32)]] | None = None
    prompt_source: UInt8 | None = None
    metadata: Opaque = Field(default_factory=dict)
    purpose: Purpose = "train"
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    min_version: Version | None = None
    max_staleness: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.prompt) == 0:
            refuse("must not be empty", ".prompt")
        if len(set(self.trajectory_ids)) < len(self.trajectory_ids):
            refuse("names a trajectory twice", ".trajectory_ids")
        if self.sample_indices is not None:
            if len(self.sample_indices) != len(self.trajectory_ids):
                refuse(
                    f"has {len(self.sample_indices)} entries for {len(self.trajectory_ids)} trajectories",
                    ".sample_indices",
                )
            if len(set(self.sample_indices)) < len(self.sample_indices):
                refuse("names a sample twice: the two would be one sequence", ".sample_indices")
        if self.prompt_source is not None:
            if len(self.prompt_source) != len(self.prompt):
                refuse(f"has {len(self.prompt_source)} entries for {len(self.prompt)} ids", ".prompt_source")
            if self.prompt_source.max() > SOURCE_PREFIX:
                refuse(f"holds a source above {SOURCE_PREFIX}", ".prompt_source")
        return self


class Times(Value):
    """Seconds by what was waited for; a trajectory's add up to its wall time in the worker."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    paused: float = 0.0
    tool_wait: float = 0.0


class Failure(Value):
    """An error as data: in `error` replies and in the records of failed trajectories.

    code: one of ERROR_CODES (errors.py). scope: what it costs. field: path of the offending field, such as
    `groups[3].sampling.top_p`. stage: where a trajectory failed (`reset`, `step`, `finish`, `generate`).
    """

    code: Name
    message: Annotated[str, Field(max_length=4096), readable(4096)]
    retryable: bool = False
    scope: Literal["request", "trajectory", "batch", "session", "worker"] = "request"
    field: Annotated[str, Field(max_length=1024), readable(1024)] | None = None
    stage: Name | None = None


class Turn(Value):
    """One sampled turn: tokens [start, start + length) of its segment were sampled by it.

    prompt_len tokens preceded it, of which cached_tokens came from the prefix cache and computed_tokens did not.
    stop: the id (as a decimal string) or the string that ended it.
    """

    index: Count
    start: Count
    length: Count
    finish_reason: TurnReason
    stop: str | None = None
    prompt_len: Count = 0
    cached_tokens: Count = 0
    computed_tokens: Count = 0
    preemptions: Count = 0
    times: Times = Times()
    reward: Reward | None = None


class Segment(Value):
    """One append-only sequence of L tokens; unless history was rewritten a trajectory has exactly one.

    token_ids int32[L]; source uint8[L] (SOURCE_*); logprobs float32[L], of the primary mode, 0.0 wherever the
    source is not sampled; loss_mask uint8[L]. `logprobs[i]` scores `token_ids[i]` given `token_ids[:i]`.
    weight_versions, kv_versions: int64[k, 2], runs of (version, count) over the sampled tokens in order.
    more_logprobs: float32[L] of the further modes asked for. prompt_logprobs: float32[P] of the primary mode over
    the first turn's prompt, entry 0 NaN. top_ids, top_logprobs: [S, k], one row per sampled token in order.
    """

    token_ids: Int32
    source: UInt8
    logprobs: Float32
    loss_mask: UInt8
    weight_versions: Int64Matrix
    kv_versions: Int64Matrix
    turns: Many[Turn]
    more_logprobs: dict[LogprobMode, Float32] = Field(default_factory=dict)
    prompt_logprobs: Float32 | None = None
    top_ids: Int32Matrix | None = None
    top_logprobs: Float32Matrix | None = None

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        length = len(self.token_ids)
        per_token = {".source": len(self.source), ".logprobs": len(self.logprobs), ".loss_mask": len(self.loss_mask)}
        per_token |= {f".more_logprobs.{mode}": len(array) for mode, array in self.more_logprobs.items()}
        for at, entries in per_token.items():
            if entries != length:
                refuse(f"has {entries} entries for {length} token_ids", at)
        if not np.isfinite(self.logprobs).all():
            refuse("must be finite", ".logprobs")
        is_sampled = self.source == SOURCE_SAMPLED
        if (self.loss_mask > is_sampled).any():
            refuse("must be 0 or 1, and 0 where the token was not sampled", ".loss_mask")
        sampled = int(np.count_nonzero(is_sampled))
        for at, runs in ((".weight_versions", self.weight_versions), (".kv_versions", self.kv_versions)):
            if runs.shape[1] != 2:
                refuse(f"must be [k, 2], not {list(runs.shape)}", at)
            if int(runs[:, 1].sum()) != sampled:
                refuse(f"covers {int(runs[:, 1].sum())} of {sampled} sampled tokens", at)
        if (self.top_ids is None) != (self.top_logprobs is None):
            refuse("top_ids and top_logprobs come together", ".top_logprobs")
        if self.top_ids is not None and self.top_logprobs is not None:
            if self.top_ids.shape != self.top_logprobs.shape:
                refuse(f"is {list(self.top_logprobs.shape)}, top_ids {list(self.top_ids.shape)}", ".top_logprobs")
            if len(self.top_ids) != sampled:
                refuse(f"has {len(self.top_ids)} rows for {sampled} sampled tokens", ".top_ids")
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) > length:
            refuse(f"has {len(self.prompt_logprobs)} entries for {length} token_ids", ".prompt_logprobs")
        for i, turn in enumerate(self.turns):
            if turn.start + turn.length > length:
                refuse(f"lies outside of the segment's {length} tokens", f".turns[{i}]")
        return self


class Truncation(Value):
    """What ended a truncated trajectory early: the limit's name (a `Budget` field or `max_context`) and value."""

    limit: str
    value: float


class Record(Value):
    """Everything about one ended trajectory.

    sampling: every effective value, the drawn seed included. rewards: named parts, when the environment gave
    any. reward None means that nobody scored it, never 0.
    """

    trajectory_id: Name
    group_id: Name
    batch_id: Name
    sample_index: Annotated[int, Field(ge=0, lt=2**32)]
    status: Status
    finish_reason: TrajectoryReason
    segments: Annotated[Many[Segment], Field(min_length=1)]
    sampling: Sampling
    reward: Reward | None = None
    rewards: dict[str, Reward] = Field(default_factory=dict, max_length=256)
    error: Failure | None = None
    truncation: Truncation | None = None
    times: Times = Times()
    wall_s: float = 0.0
    metadata: Opaque = Field(default_factory=dict)
    purpose: Purpose = "train"

    @model_validator(mode="after")
    def _status_agrees(self) -> Self:
        if self.status != STATUS_OF[self.finish_reason]:
            refuse(f"is {self.status}, but {self.finish_reason} makes it {STATUS_OF[self.finish_reason]}", ".status")
        if self.status == "failed":
            if self.error is None:
                refuse("is required of a failed trajectory", ".error")
            for i, segment in enumerate(self.segments):
                if segment.loss_mask.any():
                    refuse("must be 0 throughout in a failed trajectory", f".segments[{i}].loss_mask")
        return self


class Limits(Value):
    """What the receiver accepts; sent in `welcome`. The sizes are bytes.

    max_frame: one ZeroMQ frame. max_message: all frames of a message. max_header: its first frame. max_blobs: its
    further frames. max_nesting: depth of a `metadata` or `config`, itself counted. max_metadata: one of them as
    msgpack. max_context: tokens of a trajectory, 0 where nothing is known.
    chunk_bytes: a larger message is sent in chunks of this size. window_bytes: events sent and not yet acknowledged
    as received, per connection. result_bytes: records kept until acknowledged, all clients together.
    """

    max_frame: Size = 256 * 2**20
    max_message: Size = 512 * 2**20
    max_header: Size = 8 * 2**20
    max_nesting: Size = 16
    max_blobs: Size = 65536
    max_groups: Size = 4096
    max_trajectories: Size = 65536
    max_metadata: Size = 64 * 2**10
    max_context: Size = 0
    chunk_bytes: Annotated[Size, Field(ge=64)] = 2**20
    window_bytes: Size = 4 * 2**20
    result_bytes: Size = 2 * 2**30


class ModelInfo(Value):
    """The model served. vocab_size: rows of the head, ids are valid in [0, vocab_size)."""

    architecture: str
    dtype: str
    vocab_size: Positive
    max_context: Positive
    eos_ids: Many[TokenId] = ()
    tokenizer_hash: str | None = None
