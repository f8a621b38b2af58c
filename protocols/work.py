"""What is asked for: groups of samples, their sampling law, budget and environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, StringConstraints, model_validator

from protocols.base import Many, Opaque, Value, limited, refuse
from protocols.scalars import (
    SOURCE_PREFIX,
    Count,
    Float32,
    Int32,
    LogprobMode,
    Name,
    Positive,
    Purpose,
    Seconds,
    TokenId,
    UInt8,
    Version,
)


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
    sampling: Sampling = Field(default_factory=Sampling)
    environment: Environment = Field(default_factory=Environment)
    budget: Budget = Field(default_factory=Budget)
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
