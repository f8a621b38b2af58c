"""Submitted messages become prompts: once a group, before it is accepted. Its environment says what it takes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from protocols.errors import BadRequest
from protocols.fields import Environment, Group
from protocols.requests import SubmitBatch
from rollout.chat.aside import RENDER_S, Aside
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat
from rollout.chat.messages import checked_prompt, checked_tools, from_json
from rollout.environments.base import said_by
from rollout.environments.errors import describe
from rollout.environments.line import NOBODY, Owner

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Resolve = Callable[[Environment], object]
"""What makes a group's environments; see Registry."""


@dataclass(frozen=True, slots=True)
class Said:
    """By the class of a group's environment. tools: those of the submit, where it names some."""

    roles: Sequence[Any]
    tools: Sequence[Any]


async def asked_in_time(submit: SubmitBatch, resolve: Resolve, aside: Aside, owner: Owner) -> list[Said]:
    """`ask` beside the event loop, for it may import and run others' code. Raises BadRequest like that, and where it
    takes longer than RENDER_S."""
    try:
        return await aside.run(owner, ask, submit, resolve)
    except TimeoutError:
        names = ", ".join(sorted({group.environment.name for group in submit.groups}))
        raise BadRequest(
            f"to import the classes of {names}, and what these say of themselves (`tool_schemas`, `chat_roles`), took "
            f"longer than {RENDER_S:g} s",
            field="groups",
        ) from None


def ask(submit: SubmitBatch, resolve: Resolve) -> list[Said]:
    """What each group's environment takes. Safe to run on a thread. Raises BadRequest, naming the group's field: an
    environment that is unknown, refuses its configuration, or goes on in messages where none are submitted."""
    return [_at(i, _ask, group, resolve) for i, group in enumerate(submit.groups)]


async def prompts_in_time(
    submit: SubmitBatch, chat: ChatFormat | None, said: Sequence[Said], owner: Owner
) -> SubmitBatch:
    """`with_prompts` beside the event loop. Raises BadRequest like that, and where it takes longer than RENDER_S."""
    at = next((i for i, group in enumerate(submit.groups) if group.messages is not None), None)
    if at is None:
        return submit
    if chat is None:
        raise BadRequest(
            "the checkpoint has no chat template (or no tokenizer.json): send a prompt", field=f"groups[{at}].messages"
        )
    try:
        return await chat.aside.run(owner, with_prompts, submit, chat, said)
    except TimeoutError:
        raise BadRequest(
            f"to make prompts of these messages took longer than {RENDER_S:g} s: they are too long for one submit, or "
            "the chat template does not come to an end",
            field="groups",
        ) from None


def with_prompts(submit: SubmitBatch, chat: ChatFormat, said: Sequence[Said]) -> SubmitBatch:
    """The same with the prompt of every group that has messages, and its messages and tools in the templates' form.

    said: of each group. Safe to run on a thread. Raises BadRequest, naming the group's field: what the template does
    not take, and, where the environment goes on with messages, what it could not append after a sampled turn; or that
    of a record that goes on: what are no messages.
    """
    for i, record in enumerate(submit.partials):
        if record.partial is not None and record.partial.messages is not None:
            try:
                from_json(record.partial.messages.tobytes())
            except ChatError as error:
                field = f"partials[{i}].partial.{error.field}"
                raise BadRequest(error.message, field=field) from None
    groups = tuple(
        group if group.messages is None else _at(i, _with_prompt, group, chat, of)
        for i, (group, of) in enumerate(zip(submit.groups, said, strict=True))
    )
    return submit.model_copy(update={"groups": groups})


def check_at_start(roles: Mapping[str, Sequence[str]], chat: ChatFormat) -> None:
    """roles: of the messages that environments append, by the environment's name. Raises ValueError, naming the
    environment, where the template takes a user's messages but none of such a role; and where it comes to no end."""
    try:
        asyncio.run(Aside().run(NOBODY, _check_roles, roles, chat))
    except TimeoutError:
        raise ValueError(f"the checkpoint's chat template does not come to an end within {RENDER_S:g} s") from None


def _check_roles(roles: Mapping[str, Sequence[str]], chat: ChatFormat) -> None:
    # Some templates write results only where tools were told.
    forms = chat.form(), chat.form(checked_tools([{"name": "tool", "description": "", "parameters": {}}]))
    takes = {role: any(form.takes(role) for form in forms) for role in {"user", *itertools.chain(*roles.values())}}
    for name, said in roles.items():
        if takes["user"] and (unknown := next((role for role in said if not takes[role]), None)) is not None:
            raise ValueError(
                f"environment {name!r} says in chat_roles that it appends messages of role {unknown!r}, and the "
                "checkpoint's chat template writes nothing of those"
            )


def _at(index: int, function: Callable[Concatenate[Group, P], T], group: Group, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(group, *args, **kwargs)
    except BadRequest as error:
        raise BadRequest(error.message, field=f"groups[{index}].{error.field}") from None


def _ask(group: Group, resolve: Resolve) -> Said:
    environment = group.environment
    factory = resolve(environment)
    roles = _declared(environment, factory, "chat_roles")
    if group.messages is None:
        if roles:
            raise BadRequest(f"environment {environment.name!r} goes on in messages: submit messages", field="prompt")
        return Said((), ())
    return Said(roles, group.tools or _declared(environment, factory, "tool_schemas"))


def _declared(environment: Environment, factory: object, name: str) -> tuple[Any, ...]:
    """What an environment's class says of itself, for its configuration; () where it says nothing.

    Raises BadRequest where that fails: a class checks its configuration there.
    """
    found = getattr(said_by(factory), name, ())
    try:
        said = (found(environment.config) if callable(found) else found) or ()
        if isinstance(said, str):
            raise TypeError(f"{name} said {said!r}, not a tuple")
        return tuple(said)
    except BadRequest:
        raise
    except BaseException as error:  # a SystemExit would end the event loop
        log.warning("%s of environment %r raised", name, environment.name, exc_info=error)
        raise BadRequest(f"environment {environment.name!r}: {describe(error)}", field="environment.config") from None


def _with_prompt(group: Group, chat: ChatFormat, said: Said) -> Group:
    messages = checked_prompt(group.messages or ())
    tools = checked_tools(said.tools)
    form = chat.form(tools, group.template.options)
    prompt = form.prompt(messages)
    if said.roles:
        form.opens_reasoning()  # here, where it may take its time: an environment asks on the event loop
    if (unknown := next((role for role in said.roles if not form.takes(role)), None)) is not None:
        raise BadRequest(
            f"environment {group.environment.name!r} appends messages of role {unknown!r}, and the chat template "
            "writes nothing of those",
            field="environment.name",
        )
    if group.template.on_unstable == "refuse":
        for role in said.roles:
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
