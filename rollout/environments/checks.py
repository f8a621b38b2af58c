"""What environment code returned, checked and copied before anything relies on it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

import numpy as np
from pydantic import ValidationError

from engine.request import IntArray
from protocols.base import plain
from protocols.fields import Partial
from rollout.environments.answer import Answer
from rollout.environments.base import Environment, Observation, Rewards, Step
from rollout.environments.errors import SpeaksForItself

MAX_PARTS = 256
"""Named rewards of one trajectory."""
MAX_NAME = 256
"""Characters of the name of one."""
MAX_TOKENS = 2**31 - 1
"""Of a turn: a record says no more, as a submit cannot."""


class BadAnswer(SpeaksForItself):
    """The environment returned something that has no meaning; the message says what."""


def check_class(factory: Any) -> None:
    """What makes environments, and says what they will be like. Raises BadAnswer where that has no meaning."""
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise BadAnswer(
                f"it is made without arguments, what a submit configures is in context.config: {error}"
            ) from None
    if (on_length := getattr(factory, "on_length", "end")) not in ("end", "continue"):
        raise BadAnswer(f"on_length is {on_length!r}, neither 'end' nor 'continue'")
    where = getattr(factory, "isolation", "worker")
    if where not in ("worker", "process"):
        raise BadAnswer(f"isolation is {where!r}, neither 'worker' nor 'process'")
    if getattr(factory, "immediate", False) and inspect.iscoroutinefunction(getattr(factory, "step", None)):
        raise BadAnswer("step is asynchronous, and immediate says that it does not wait")
    roles = getattr(factory, "chat_roles", ())
    if callable(roles):
        return
    if not isinstance(roles, list | tuple | set | frozenset) or not all(
        isinstance(role, str) and role.isidentifier() for role in roles
    ):
        raise BadAnswer(f"chat_roles is {roles!r}, not a tuple of roles")


def check_environment(made: Any) -> Environment:
    if not isinstance(made, Environment):
        raise BadAnswer(f"the factory made {_kind(made)}, not an Environment")
    if made.on_length not in ("end", "continue"):
        raise BadAnswer(f"on_length is {made.on_length!r}, neither 'end' nor 'continue'")
    return made


def check_observation(returned: Any, vocab_size: int) -> Answer:
    """Of `reset`."""
    if returned is None:
        return Answer()
    if not isinstance(returned, Observation):
        raise BadAnswer(f"reset returned {_kind(returned)}, not an Observation or None")
    return Answer(
        glue=_ids(returned.glue, "glue", vocab_size),
        observation=_ids(returned.ids, "ids", vocab_size),
        max_tokens=_max_tokens(returned.max_tokens),
    )


def check_step(returned: Any, vocab_size: int) -> Answer:
    """Of `step`."""
    if not isinstance(returned, Step):
        forgotten = ": is an `await` missing?" if inspect.isawaitable(returned) else ""
        raise BadAnswer(f"step returned {_kind(returned)}, not a Step{forgotten}")
    if not isinstance(done := plain(returned.done), bool):
        raise BadAnswer(f"done is {_kind(done)}, not a bool")
    return Answer(
        glue=_ids(returned.glue, "glue", vocab_size),
        observation=_ids(returned.observation, "observation", vocab_size),
        opening=_ids(returned.opening, "opening", vocab_size),
        branch=_branch(_ids(returned.branch, "branch", vocab_size)),
        called=bool(returned.called),
        max_tokens=_max_tokens(returned.max_tokens),
        done=done,
        reward=_reward(returned.reward, "reward"),
    )


def _branch(ids: IntArray | None) -> IntArray | None:
    if ids is not None and not len(ids):
        raise BadAnswer("branch is empty: a segment begins with something")
    return ids


def check_snapshot(returned: Any) -> dict[str, Any]:
    """Of `snapshot`: a copy, which takes a second for a million values."""
    if not isinstance(returned, Mapping):
        raise BadAnswer(f"snapshot returned {_kind(returned)}, not a mapping")
    try:
        return Partial(snapshot=dict(returned)).snapshot or {}
    except ValidationError as error:
        raise BadAnswer(f"snapshot returned what cannot be sent: {error.errors()[0]['msg']}") from None


def check_nothing(_: Any) -> None:
    """Of a method whose answer means nothing."""


def check_final(returned: Any) -> Rewards:
    """Of `finish`: the total (None when nobody scored) and its named parts."""
    if isinstance(returned, Rewards):
        return Rewards(_reward(returned.total, "total"), _parts(returned.parts))
    if isinstance(returned, Mapping):
        parts = _parts(returned)
        return Rewards(_reward(sum(parts.values()), "the sum of the parts") if parts else None, parts)
    return Rewards(_reward(returned, "reward"))


def _parts(parts: Any) -> dict[str, float]:
    if not isinstance(parts, Mapping):
        raise BadAnswer(f"the named rewards are {_kind(parts)}, not a mapping")
    if len(parts) > MAX_PARTS:
        raise BadAnswer(f"{len(parts)} named rewards are more than {MAX_PARTS}")
    checked = {}
    for name, value in parts.items():
        if not isinstance(name, str):
            raise BadAnswer(f"the name of a reward is {_kind(name)}, not a string")
        if not _is_text(name):
            raise BadAnswer(f"the name of a reward is not 1 to {MAX_NAME} characters of UTF-8: {name[:64]!a}")
        if (reward := _reward(value, f"reward {name[:64]!r}")) is None:
            raise BadAnswer(f"reward {name[:64]!r} is None: leave it out")
        checked[name] = reward
    return checked


def _is_text(name: str) -> bool:
    """A lone surrogate cannot be sent."""
    return 0 < len(name) <= MAX_NAME and name.encode(errors="replace").decode() == name


def _reward(value: Any, name: str) -> float | None:
    value = plain(value)
    if value is None:
        return None
    if not isinstance(value, Real):
        raise BadAnswer(f"{name} is {_kind(value)}, not a number")
    try:
        reward = float(value)
    except OverflowError:
        raise BadAnswer(f"{name} is {_kind(value)} too large for a float") from None
    if not math.isfinite(reward):
        raise BadAnswer(f"{name} is {reward}, not finite")
    return reward


def _max_tokens(value: Any) -> int | None:
    value = plain(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadAnswer(f"max_tokens is {_kind(value)}, not an int")
    if value < 1:
        raise BadAnswer(f"max_tokens is {value}, not positive")
    if value > MAX_TOKENS:
        raise BadAnswer(f"max_tokens is {value if value < 2**64 else 'an int'}, more than {MAX_TOKENS}")
    return int(value)


def _ids(value: Any, name: str, vocab_size: int) -> IntArray | None:
    """A copy: the environment may reuse its buffer."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        wrong = {kind for kind in set(map(type, value)) if kind is bool or not issubclass(kind, int | np.integer)}
        if wrong:
            at = next(i for i, item in enumerate(value) if type(item) in wrong)
            raise BadAnswer(f"{name}[{at}] is {_kind(value[at])}, not an int")
        ids = np.array(value) if value else np.zeros(0, np.int32)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim == 1:
        ids = value
    else:
        advice = ": context.encode makes ids of it, chat.follow a message" if isinstance(value, str) else ""
        raise BadAnswer(f"{name} is {_kind(value)}, not a list or one-dimensional integer array{advice}")
    if (outside := outside_of(ids, vocab_size)) is not None:
        raise BadAnswer(f"{name}[{outside}] is {value[outside]}, outside of the vocabulary of {vocab_size} ids")
    return ids.astype(np.int32)


def outside_of(ids: np.ndarray, vocab_size: int) -> int | None:
    """Position of the first id that the model does not have. ids: of any kind of number."""
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return None
    return int(np.argmax((ids < 0) | (ids >= vocab_size)))


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
