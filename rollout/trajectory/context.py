"""What the environment of a trajectory is told."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable

from protocols.fields import ModelInfo
from protocols.requests import Continue
from rollout.chat.conversation import Conversation
from rollout.chat.format import ChatFormat
from rollout.environments.base import Context, TextCodec, TurnResult
from rollout.environments.line import Owner
from rollout.trajectory.spec import TrajectorySpec


def context_of(
    spec: TrajectorySpec,
    model: ModelInfo,
    *,
    ask: Callable[[TurnResult], Awaitable[Continue]],
    tokenizer: TextCodec | None,
    chat: ChatFormat | None,
) -> Context:
    """Copies of what others hold too. ask: see `Context`."""
    group, conversation = spec.group, None
    if chat is not None and group.messages is not None:
        form = chat.form(group.tools, group.template.options)
        owner = Owner(spec.session, spec.batch_id, spec.trajectory_id)
        conversation = Conversation(form, copy.deepcopy(group.messages), group.template, spec.said, owner)
    return Context(
        trajectory_id=spec.trajectory_id,
        group_id=group.id,
        sample_index=spec.sample_index,
        seed=spec.seed,
        prompt=group.prompt.copy(),
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        ask=ask,
        metadata=copy.deepcopy(group.metadata),
        config=copy.deepcopy(group.environment.config),
        purpose=group.purpose,
        tokenizer=tokenizer,
        chat=conversation,
    )
