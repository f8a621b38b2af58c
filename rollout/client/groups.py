"""From what a trainer holds (lists, arrays, dicts) to the messages of a submit."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from protocols.codec import bad_request
from protocols.errors import BadRequest
from protocols.fields import (
    Budget,
    Environment,
    Group,
    LogprobMode,
    Purpose,
    Sampling,
    ScriptedTurn,
    Template,
    Value,
)

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids: a list, a numpy array, or anything that numpy reads as one-dimensional integers."""

V = TypeVar("V", bound=Value)


def int32(ids: Any, field: str) -> npt.NDArray[np.int32]:
    """int32[L] of token ids, copied unless they are that already. Raises BadRequest naming `field`."""
    if isinstance(ids, str):
        raise BadRequest(
            "must be token ids, not text: encode it by the model's tokenizer, or give messages", field=field
        )
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"must be token ids: {error}", field=field) from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(
            f"must be one-dimensional integers, not {array.dtype} with {array.ndim} dimension(s)", field=field
        )
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise BadRequest(f"ids lie in [0, 2**31), found {array.min()} .. {array.max()}", field=field)
    return array.astype(np.int32)


def checked(model: type[V], **fields: Any) -> V:
    """Build a protocol value; what the model refuses is a BadRequest with the field's name."""
    try:
        return model(**fields)
    except ValidationError as error:
        raise bad_request(error) from None


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
    """`protocols.fields.Sampling` of the options of a `Law`; without any it is neutral."""
    fields: dict[str, Any] = dict(law)
    bias = sorted((fields.pop("logit_bias", None) or {}).items())
    if bias:
        fields["bias_ids"] = int32([i for i, _ in bias], "logit_bias")
        fields["bias_values"] = np.array([value for _, value in bias], np.float32)
    if fields.get("allowed_ids") is not None:
        fields["allowed_ids"] = int32(fields["allowed_ids"], "allowed_ids")
    for name in fields.keys() & {"stop_ids", "stop", "logprobs"}:
        value = fields[name]
        fields[name] = (value,) if isinstance(value, str) else tuple(value)
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
        if n < 1:
            raise BadRequest(f"must be at least 1, not {n}", field="n")
        if (prompt_ids is None) == (messages is None):
            raise BadRequest(
                "give either prompt_ids or messages", field="prompt_ids" if messages is None else "messages"
            )
        prompt = int32([] if prompt_ids is None else prompt_ids, "prompt_ids")
        if messages is None and not len(prompt):
            raise BadRequest("must not be empty", field="prompt_ids")
        name = id if id is not None else f"{self._prefix}-{next(self._numbers)}"
        names = tuple(trajectory_ids) if trajectory_ids is not None else tuple(f"{name}.{i}" for i in range(n))
        for field, values in (("trajectory_ids", names), ("sample_indices", sample_indices)):
            if values is not None and (len(values) != n or len(set(values)) != n):
                raise BadRequest(f"must be {n} different values", field=field)
        return checked(
            Group,
            id=name,
            prompt=prompt,
            messages=None if messages is None else tuple(messages),
            tools=tuple(tools),
            template=checked(
                Template, options=dict(template_options or {}), on_user_turn=on_user_turn, on_unstable=on_unstable
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
            sample_indices=None if sample_indices is None else tuple(sample_indices),
            prompt_source=None if prompt_source is None else np.asarray(prompt_source, np.uint8),
            metadata=dict(metadata or {}),
            purpose=purpose,
            priority=priority,
            min_version=min_version,
            max_staleness=max_staleness,
        )


def _environment(
    environment: str | Environment | None,
    config: Mapping[str, Any] | None,
    script: Sequence[ScriptedTurn | Ids] | None,
) -> Environment:
    if isinstance(environment, Environment):
        if config is not None or script is not None:
            raise BadRequest("an Environment holds its own config and script", field="environment")
        return environment
    name = environment or "scripted"
    if not isinstance(name, str):
        raise BadRequest("must be a name (its configuration goes into config=) or an Environment", field="environment")
    if script is not None and name != "scripted":
        raise BadRequest(f"environment {name!r} takes no script", field="script")
    if config and environment is None:
        raise BadRequest("is of an environment, and none is named", field="config")
    entries = tuple(
        entry if isinstance(entry, ScriptedTurn) else turn(int32(entry, f"script[{k}]"))
        for k, entry in enumerate(script or ())
    )
    return checked(Environment, name=name, script=entries, config=dict(config or {}))
