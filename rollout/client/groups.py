"""From what a trainer holds (lists, arrays, dicts) to the messages of a submit."""

from __future__ import annotations

import inspect
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np

from protocols.base import suggestion
from protocols.errors import BadRequest
from protocols.fields import (
    Budget,
    Environment,
    Group,
    Limits,
    LogprobMode,
    Purpose,
    Sampling,
    ScriptedTurn,
    Template,
)
from rollout.client.values import Ids, checked, int32, mapping, number, several, uint8, whole

MOST: Final[int] = Limits.model_fields["max_trajectories"].default
"""Samples of a group, which no submit could be larger than."""


class Law(TypedDict, total=False):
    """The law of a turn, from plain Python values. Meaning and defaults: `protocols.fields.Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    allowed_ids: Ids | None
    logit_bias: Mapping[int, float] | None
    """From id to bias."""
    seed: int | None
    max_tokens: int | None
    stop_ids: Iterable[int]
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: LogprobMode | Sequence[LogprobMode]
    top_logprobs: int
    prompt_logprobs: bool


def sampling(**law: Unpack[Law]) -> Sampling:
    """`protocols.fields.Sampling` of the options of a `Law`; without any it is neutral. Raises BadRequest."""
    _check_names(law, sampling)
    fields: dict[str, Any] = dict(law)
    bias = mapping(fields.pop("logit_bias", None), "logit_bias")
    if bias:
        ids = int32(list(bias), "logit_bias")
        values = np.array([number(value, "logit_bias") for value in bias.values()], np.float32)
        fields["bias_ids"], fields["bias_values"] = np.sort(ids), values[np.argsort(ids)]
    if fields.get("allowed_ids") is not None:
        fields["allowed_ids"] = int32(fields["allowed_ids"], "allowed_ids")
    for name in fields.keys() & {"stop_ids", "stop", "logprobs"}:
        fields[name] = several(fields[name], name)
    return checked(Sampling, **fields)


def turn(observation: Ids | None = None, *, glue: Ids | None = None, max_tokens: int | None = None) -> ScriptedTurn:
    """One entry of a script: what follows a sampled turn. glue: template tokens around the observation."""
    return checked(
        ScriptedTurn,
        glue=None if glue is None else int32(glue, "glue"),
        observation=None if observation is None else int32(observation, "observation"),
        max_tokens=max_tokens,
    )


class GroupMaker:
    """`group()`: builds groups whose ids no other group of this client has."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()

    def group(
        self,
        prompt_ids: Ids | None = None,
        n: int = 1,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_options: Mapping[str, Any] | None = None,
        on_user_turn: Literal["keep", "drop"] = "keep",
        on_unstable: Literal["refuse", "branch"] = "refuse",
        id: str | None = None,  # noqa: A002
        environment: str | Environment | None = None,
        config: Mapping[str, Any] | None = None,
        script: Sequence[ScriptedTurn | Ids] | None = None,
        max_turns: int | None = None,
        max_total_tokens: int | None = None,
        turn_deadline_s: float | None = None,
        tool_deadline_s: float | None = None,
        trajectory_deadline_s: float | None = None,
        on_length: Literal["end", "continue"] | None = None,
        metadata: Mapping[str, Any] | None = None,
        purpose: Purpose = "train",
        priority: int = 0,
        min_version: int | None = None,
        max_staleness: int | None = None,
        trajectory_ids: Sequence[str] | None = None,
        sample_indices: Sequence[int] | None = None,
        prompt_source: Any = None,
        **law: Unpack[Law],
    ) -> Group:
        """n samples of one prompt, to be handed to `submit`.

        messages: instead of prompt_ids; the worker renders them with the checkpoint's chat template, whose own options
        are template_options (`{"enable_thinking": False}`). tools: JSON schemas; the environment's own when empty.
        on_user_turn, on_unstable: docs/chat.md.

        max_tokens: of each turn; without it a turn ends at an EOS or stop id, or where the context is full.
        min_version: wait until the worker serves it. id: the group's; made up when None. Trajectory i is called
        `{id}.{i}` unless `trajectory_ids` names all.
        script: what follows each sampled turn, token ids or `turn(observation, glue=..., max_tokens=...)`; it
        implies the environment "scripted". environment: a name the worker knows, with its `config`, or an
        `Environment`. law: temperature, seed, stop and so on (docs/client.md has all). The budget and the rest:
        `protocols.fields.Budget`, `Group`.

        Raises BadRequest naming the field. What only the worker knows (vocabulary, limits) is checked by `submit`.
        """
        _check_names(law, GroupMaker.group)
        n = whole(n, "n")
        if not 1 <= n <= MOST:
            raise BadRequest(f"must lie in [1, {MOST}], not {n}", field="n")
        if (prompt_ids is None) == (messages is None):
            raise BadRequest(
                "give either prompt_ids or messages", field="prompt_ids" if messages is None else "messages"
            )
        prompt = int32([] if prompt_ids is None else prompt_ids, "prompt_ids")
        if messages is None and not len(prompt):
            raise BadRequest("must not be empty", field="prompt_ids")
        name = id if id is not None else f"{self._prefix}-{next(self._numbers)}"
        names = several(
            [f"{name}.{i}" for i in range(n)] if trajectory_ids is None else trajectory_ids, "trajectory_ids"
        )
        indices = None if sample_indices is None else several(sample_indices, "sample_indices")
        for field, values in (("trajectory_ids", names), ("sample_indices", indices)):
            if values is not None and len(values) != n:
                raise BadRequest(f"must be {n} different values", field=field)
        return checked(
            Group,
            id=name,
            prompt=prompt,
            messages=None if messages is None else several(messages, "messages"),
            tools=_schemas(tools),
            template=checked(
                Template,
                options=mapping(template_options, "template_options"),
                on_user_turn=on_user_turn,
                on_unstable=on_unstable,
            ),
            trajectory_ids=names,
            sampling=sampling(**law),
            environment=_environment(environment, config, script),
            budget=checked(
                Budget,
                max_turns=max_turns,
                max_total_tokens=max_total_tokens,
                turn_deadline_s=turn_deadline_s,
                tool_deadline_s=tool_deadline_s,
                trajectory_deadline_s=trajectory_deadline_s,
                on_length=on_length,
            ),
            sample_indices=indices,
            prompt_source=None if prompt_source is None else uint8(prompt_source, "prompt_source"),
            metadata=mapping(metadata, "metadata"),
            purpose=purpose,
            priority=priority,
            min_version=min_version,
            max_staleness=max_staleness,
        )


def _check_names(law: Mapping[str, Any], call: Callable[..., Any]) -> None:
    """Raises BadRequest for what is no option of a `Law`; another argument of `call` may have been meant."""
    for name in law:
        if name not in Law.__annotations__:
            known = [*Law.__annotations__, *inspect.signature(call).parameters]
            raise BadRequest(f"unknown field{suggestion(name, known)}", field=name)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    found = several(tools, "tools")
    if (at := next((i for i, tool in enumerate(found) if callable(tool)), None)) is not None:
        raise BadRequest(
            "is a function: it belongs where the worker starts (--tools MODULE), and here the JSON schema that the "
            "template prints, or nothing",
            field=f"tools[{at}]",
        )
    return found


def _environment(
    environment: str | Environment | None,
    config: Mapping[str, Any] | None,
    script: Sequence[ScriptedTurn | Ids] | None,
) -> Environment:
    if isinstance(environment, Environment):
        if config is not None or script is not None:
            raise BadRequest("an Environment holds its own config and script", field="environment")
        return environment
    name = "scripted" if environment is None else environment
    if not isinstance(name, str) or not name:
        raise BadRequest("must be a name (its configuration goes into config=) or an Environment", field="environment")
    if script is not None and name != "scripted":
        raise BadRequest(f"environment {name!r} takes no script", field="script")
    settings = mapping(config, "config")
    if settings and environment is None:
        raise BadRequest("is of an environment, and none is named", field="config")
    entries = enumerate(several(() if script is None else script, "script"))
    turns = tuple(_scripted(entry, f"script[{k}]") for k, entry in entries)
    return checked(Environment, name=name, script=turns, config=settings)


def _scripted(entry: Any, field: str) -> ScriptedTurn:
    if isinstance(entry, ScriptedTurn):
        return entry
    if entry is None or isinstance(entry, int | float | np.generic | Mapping):
        raise BadRequest(
            f"must be what follows one turn, a list of token ids or a turn(...), not {str(entry)[:64]}", field=field
        )
    return turn(int32(entry, field))
