"""Submitted messages become prompts: once a group, before it is accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from protocols.errors import BadRequest
from protocols.fields import Environment, Group
from protocols.requests import SubmitBatch
from rollout.chat.aside import RENDER_S
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat
from rollout.chat.messages import checked_prompt, checked_tools, from_json
from rollout.environments.base import said_by
from rollout.environments.errors import describe

log = logging.getLogger(__name__)

Resolve = Callable[[Environment], object]
"""What makes a group's environments; see Registry."""


def has_messages(submit: SubmitBatch) -> bool:
    return any(group.messages is not None for group in submit.groups)


async def prompts_in_time(submit: SubmitBatch, chat: ChatFormat | None, resolve: Resolve) -> SubmitBatch:
    """`with_prompts` beside the event loop. Raises BadRequest like that, and where it takes longer than RENDER_S."""
    if chat is None:
        at = next(i for i, group in enumerate(submit.groups) if group.messages is not None)
        raise BadRequest(
            "the checkpoint has no chat template (or no tokenizer.json): send a prompt", field=f"groups[{at}].messages"
        )
    try:
        return await chat.aside.run(with_prompts, submit, chat, resolve)
    except TimeoutError:
        raise BadRequest(
            f"to make prompts of these messages took longer than {RENDER_S:g} s: they are too long for one submit, or "
            "the chat template does not come to an end",
            field="groups",
        ) from None


def with_prompts(submit: SubmitBatch, chat: ChatFormat, resolve: Resolve) -> SubmitBatch:
    """The same with the prompt of every group that has messages, and its messages and tools in the templates' form.

    Safe to run on a thread. Raises BadRequest, naming the group's field: what the template does not take, and, where
    the environment goes on with messages, what it could not append after a sampled turn; or that of a record that goes
    on: what are no messages.
    """
    for i, record in enumerate(submit.partials):
        if record.partial is not None and record.partial.messages is not None:
            try:
                from_json(record.partial.messages.tobytes())
            except ChatError as error:
                field = f"partials[{i}].partial.{error.field}"
                raise BadRequest(error.message, field=field) from None
    groups = []
    for i, group in enumerate(submit.groups):
        try:
            groups.append(group if group.messages is None else _with_prompt(group, chat, resolve))
        except BadRequest as error:
            raise BadRequest(error.message, field=f"groups[{i}].{error.field}") from None
    return submit.model_copy(update={"groups": tuple(groups)})


def declared(environment: Environment, factory: object, name: str) -> tuple[Any, ...]:
    """What an environment's class says of itself, for its configuration; () where it says nothing.

    Raises BadRequest where that fails: a class checks its configuration there.
    """
    found = getattr(said_by(factory), name, ())
    try:
        return tuple((found(environment.config) if callable(found) else found) or ())
    except BadRequest:
        raise
    except BaseException as error:  # a SystemExit would end the event loop
        log.warning("%s of environment %r raised", name, environment.name, exc_info=error)
        raise BadRequest(f"environment {environment.name!r}: {describe(error)}", field="environment.config") from None


def _with_prompt(group: Group, chat: ChatFormat, resolve: Resolve) -> Group:
    factory = resolve(group.environment)
    messages = checked_prompt(group.messages or ())
    tools = checked_tools(group.tools or declared(group.environment, factory, "tool_schemas"))
    form = chat.form(tools, group.template.options)
    prompt = form.prompt(messages)
    roles = declared(group.environment, factory, "chat_roles")
    if roles:
        form.opens_reasoning()  # here, where it may take its time: an environment asks on the event loop
    if group.template.on_unstable == "refuse":
        for role in roles:
            for together in ((role,), (role, role)) if role == "tool" else ((role,),):
                try:
                    form.prove(together)
                except ChatError as error:
                    raise BadRequest(
                        f"a message of role {role!r} cannot be appended to a sampled turn: {error.message}; "
                        "ask for on_unstable 'branch' to have the conversation rendered anew at each such turn",
                        field="template.on_unstable",
                    ) from None
    return group.model_copy(update={"prompt": prompt, "messages": messages, "tools": tools})
