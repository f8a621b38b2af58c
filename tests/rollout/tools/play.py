"""One trajectory of a tool environment on an engine that says what it is told, in the tiny chat format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from engine.request import Completion, Request
from protocols.fields import Budget, Environment, Group, Record, Sampling, Template
from protocols.requests import SubmitBatch
from rollout.chat.accept import ask, with_prompts
from rollout.chat.format import ChatFormat
from rollout.environments.pool import NOBODY, Owner, Pool
from rollout.generation.async_engine import AsyncEngine
from rollout.tools.environment import Placed, ToolEnvironment
from rollout.trajectory.rollout import Rollout
from tests.rollout.build import MODEL, spec
from tests.rollout.chat.tiny import THINKING, chat, ids, tokenizer
from tests.rollout.stub_engine import StubEngine, completed

END = tokenizer().special("<|im_end|>")
CONTEXT = MODEL.model_copy(update={"max_context": 60_000, "eos_ids": (END,)})
USER = {"role": "user", "content": "hello"}
Say = str | tuple[str, str] | list[int]
"""A turn: a text that ends itself, a text and how else it ended, or ids."""


def chat_group(messages: Sequence[dict[str, Any]] = (USER,), **fields: Any) -> Group:
    config = fields.pop("config", {})
    defaults: dict[str, Any] = {
        "sampling": Sampling(max_tokens=30_000),
        "budget": Budget(**fields.pop("budget", {})),
        "template": Template(**fields.pop("template", {})),
        "environment": Environment(name="tools", config=config),
    }
    return Group(id="g", messages=tuple(messages), trajectory_ids=("t",), **{**defaults, **fields})


def rendered(group: Group, make: Any, jinja: str = THINKING) -> Group:
    return rendered_by(chat(jinja), group, make)


def rendered_by(form: ChatFormat, group: Group, make: Any) -> Group:
    submit = SubmitBatch(id="1", batch_id="b", groups=(group,))
    (made,) = with_prompts(submit, form, ask(submit, lambda _: make)).groups
    return made


def saying(turns: Sequence[Say]) -> Callable[[Request], Completion]:
    """The last one again and again."""
    said = iter(turns)
    last: Say = "nothing"

    def reply(request: Request) -> Completion:
        nonlocal last
        last = next(said, last)
        if isinstance(last, list):
            return completed(request, last)
        if isinstance(last, str):
            return completed(request, [*ids(last), END])
        text, how = last
        return completed(request, ids(text), how)  # type: ignore[arg-type]

    return reply


async def play(
    make: type[ToolEnvironment],
    *turns: Say,
    pool: Pool | None = None,
    owner: Owner = NOBODY,
    jinja: str = THINKING,
    **fields: Any,
) -> Record:
    """`fields` of the group; the record of its one trajectory."""
    cut = [len(ids(turn[0])) for turn in turns if isinstance(turn, tuple)]
    fields = {"sampling": Sampling(max_tokens=cut[0] if cut else 30_000), **fields}
    group = rendered(chat_group(**fields), make, jinja)
    engine = AsyncEngine(StubEngine(saying(turns)))
    await engine.start()
    rollout = Rollout(
        spec(group),
        engine=engine,
        environment=make if pool is None else Placed(make, pool, owner),
        model=CONTEXT,
        on_turn=print,
        tokenizer=tokenizer(),
        chat=chat(jinja),
    )
    return await rollout.run()


def observed(record: Record) -> list[str]:
    """The texts between sampled turns, of the last segment."""
    segment = record.segments[-1]
    spans = [(turn.start, turn.start + turn.length) for turn in segment.turns]
    ends = [start for start, _ in spans[1:]] + [len(segment.token_ids)]
    return [tokenizer().decode(segment.token_ids[end:until]) for (_, end), until in zip(spans, ends, strict=True)]


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 120))
