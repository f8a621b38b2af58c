"""What is asked for: groups of samples, their sampling law, budget and environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints, model_validator

from protocols.base import Many, Value, limited, refuse
from protocols.opaque import ChatMap, Opaque
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

    Applied in this order: allowed_ids and bias, penalties, temperature, top_k, top_p, min_p; then noise and argmax.

    temperature: 0 is greedy: the highest logit, the lowest id among equals.
    top_k: 0 keeps all; ties with the k-th are kept.
    top_p: the smallest set of at least this mass, ties by lowest id; 1 keeps all.
    min_p: what is below this share of the likeliest is dropped; 0 keeps all.
    repetition_penalty: over all ids of the trajectory; 1 is none.
    presence_penalty: over the sampled ids of all turns.
    frequency_penalty: over the sampled ids of all turns, by their number.
    allowed_ids: the only ids that may be sampled; nil allows all.
    bias_ids: ids whose logits bias_values are added to (a map with int keys would not survive msgpack).
    bias_values: as long as bias_ids, finite.
    seed: drawn by the worker when nil; the record echoes what was used.
    max_tokens: sampled tokens of one turn; nil fills up to the context limit.
    stop_ids: end a turn, besides the checkpoint's EOS list. The stop token is kept.
    stop: strings that end a turn, matched over the text of the sampled tokens.
    ignore_eos: go on past the checkpoint's EOS list; stop_ids still count.
    logprobs: which logprobs come back, the primary one first. `processed`: of the distribution really sampled from;
        `temperature`: of the logits divided by the temperature; `raw`: of the logits.
    top_logprobs: alternatives returned for every sampled token.
    prompt_logprobs: score the first turn's prompt too.
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
    """Where a trajectory ends whatever its environment says. Nil means no limit of its own.

    max_turns: sampled turns.
    max_total_tokens: every token of the trajectory, prompt and observations included; nil is the context limit.
    turn_deadline_s: of the sampling of one turn.
    tool_deadline_s: of one answer of the environment.
    trajectory_deadline_s: of the whole, waiting for its start included.
    on_length: does a turn cut by max_tokens end the trajectory? Nil asks the environment (scripted: continue;
        others: end).
    """

    max_turns: Positive | None = None
    max_total_tokens: Positive | None = None
    turn_deadline_s: Seconds | None = None
    tool_deadline_s: Seconds | None = None
    trajectory_deadline_s: Seconds | None = None
    on_length: Literal["end", "continue"] | None = None


class ScriptedTurn(Value):
    """What follows one sampled turn.

    glue: template tokens that end the turn and open the next one.
    observation: what the environment says.
    max_tokens: budget of the turn that this observation opens; nil keeps `sampling.max_tokens`.
    """

    glue: Int32 | None = None
    observation: Int32 | None = None
    max_tokens: Positive | None = None


class Environment(Value):
    """Which environment answers the model.

    name: `scripted`, `remote` (the trainer answers each `turn_done` with `continue`), or a name that was registered
        when the worker started.
    script: only of `scripted`: entry k follows turn k, and the trajectory ends with the turn after the last entry.
    config: for a registered environment; the wire does not interpret it.
    """

    name: Name = "scripted"
    script: Many[ScriptedTurn] = ()
    config: Opaque = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.script and self.name != "scripted":
            refuse('belongs to the environment "scripted"', ".script")
        return self

    @property
    def stateless(self) -> bool:
        """Does the worker hold nothing of it but what a record shows?"""
        return self.name in ("scripted", "remote")


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


class Template(Value):
    """How messages become ids: the checkpoint's chat template, and what is done where it would rewrite history.

    options: variables of the template, such as enable_thinking.
    on_user_turn: what happens to the reasoning of earlier turns when a user speaks again. `keep` appends; `drop` lets
        the template render the conversation anew, and what then differs begins a new segment.
    on_unstable: what happens where the template's text after a turn depends on that turn: `refuse` the submit, or
        `branch`: render the conversation anew at every such turn, in a new segment.
    """

    options: Opaque = Field(default_factory=dict)
    on_user_turn: Literal["keep", "drop"] = "keep"
    on_unstable: Literal["refuse", "branch"] = "refuse"

    @property
    def may_branch(self) -> bool:
        """Can a trajectory come to have several segments?"""
        return (self.on_user_turn, self.on_unstable) != ("keep", "refuse")


class Group(Value):
    """n samples of one prompt; n is the number of trajectory ids.

    id: unique within its batch.
    prompt: ids below the model's vocab_size; empty where there are messages.
    messages: instead of the prompt (capability `chat`): maps with role and content, which the checkpoint's chat
        template renders.
    tools: JSON schemas of functions, for the template to print; those of the environment when empty.
    template: belongs to messages.
    trajectory_ids: the caller's, unique within the session.
    sample_indices: the noise key of each sample, all different; 0 to n - 1 when nil.
    prompt_source: as long as the prompt, when that already holds sampled tokens (a resumed record); nil means that all
        of it is prompt.
    metadata: echoed in every record.
    purpose: `eval` keeps the group out of the training metrics.
    counted: samples of it that an earlier submit had `completed` or `truncated`, which count towards min_complete. A
        group that had enough of them does not count towards groups_needed.
    priority: higher starts earlier.
    min_version: wait until weights of at least this version serve.
    max_staleness: end the trajectory as `abort_stale` rather than let its oldest token fall further behind the serving
        version.
    """

    id: Name
    prompt: Int32 = Field(default_factory=_no_ids)
    messages: Annotated[Many[ChatMap], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[Many[ChatMap], Field(max_length=1024)] = ()
    template: Template = Field(default_factory=Template)
    trajectory_ids: Annotated[Many[Name], Field(min_length=1), limited("max_trajectories")]
    sampling: Sampling = Field(default_factory=Sampling)
    environment: Environment = Field(default_factory=Environment)
    budget: Budget = Field(default_factory=Budget)
    sample_indices: Many[Annotated[int, Field(ge=0, lt=2**32)]] | None = None
    prompt_source: UInt8 | None = None
    metadata: Opaque = Field(default_factory=dict)
    purpose: Purpose = "train"
    counted: Count = 0
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    min_version: Version | None = None
    max_staleness: Annotated[int, Field(ge=0, lt=2**63)] | None = None

    def needed(self, min_complete: int | None, samples: int) -> int:
        """How many of so many samples, and of those counted before, make the group complete."""
        everything = self.counted + samples
        return min(min_complete or everything, everything)

    def __repr__(self) -> str:
        """For a person, who may have hundreds of them in a tuple."""
        prompt = f"{len(self.prompt)} prompt tokens" if self.messages is None else f"{len(self.messages)} messages"
        return f"Group({self.id!r}, {len(self.trajectory_ids)} trajectories, {prompt}, {self.environment.name!r})"

    __str__ = __repr__

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.messages is None:
            if len(self.prompt) == 0:
                refuse("must not be empty where there are no messages", ".prompt")
            if self.tools:
                refuse("belong to messages", ".tools")
            if self.template.options or self.template.may_branch:
                refuse("belongs to messages", ".template")
        elif len(self.prompt) or self.prompt_source is not None:
            refuse("must be left out where there are messages", ".prompt" if len(self.prompt) else ".prompt_source")
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
