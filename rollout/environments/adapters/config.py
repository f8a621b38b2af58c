"""What the adapters share: reading a submit's config, and the seed of one sample."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.environments.base import Context

if TYPE_CHECKING:  # it takes what a worker takes; `messages` is for where there is a client alone
    from rollout.chat.conversation import Conversation

T = TypeVar("T")


def option(config: Mapping[str, Any], name: str, default: T) -> T:
    """Of the default's type. Raises ValueError."""
    value = config.get(name, default)
    if not isinstance(value, type(default)) or isinstance(value, bool) != isinstance(default, bool):
        raise ValueError(f"config.{name} must be a {type(default).__name__}, not {value!r}")
    return value


def index(config: Mapping[str, Any]) -> int:
    """Which task of its kind. Raises ValueError."""
    value = option(config, "index", 0)
    if value < 0:
        raise ValueError(f"config.index must not be negative, but is {value}")
    return value


def known(config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises ValueError where the config has any others."""
    if unknown := [name for name in config if name not in names]:
        raise ValueError(f"config.{unknown[0]} is unknown; known: {', '.join(names)}")


def generator(context: Context) -> random.Random:
    """For what samples of one group must not share. Depends on (seed, sample_index) alone."""
    return random.Random(f"{context.seed}/{context.sample_index}")


def conversation(context: Context) -> Conversation:
    """Raises ValueError where the group came with token ids."""
    if context.chat is None:
        raise ValueError("this environment talks: submit messages (see `messages` in its module), not a prompt")
    return context.chat
