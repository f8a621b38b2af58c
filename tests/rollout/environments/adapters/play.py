"""One trajectory through an adapter, the model's part read from a list: real rendering, real registry, no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocols.fields import Budget, Environment, Group, ModelInfo, Record, Sampling
from protocols.requests import SubmitBatch
from rollout.chat.accept import ask, with_prompts
from rollout.environments.base import EnvironmentFactory
from rollout.environments.isolated import Isolated
from rollout.environments.registry import Registry
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests.rollout.build import run, spec
from tests.rollout.chat.tiny import PLAIN, chat, tokenizer
from tests.rollout.stub_engine import StubEngine, completed

END = tokenizer().special("<|im_end|>")
MODEL = ModelInfo(architecture="stub", dtype="float32", vocab_size=512, max_context=2**17, eos_ids=(END,))

Reply = Callable[[str], str]
"""From everything so far to what the model says."""


def play(
    factory: EnvironmentFactory,
    config: Mapping[str, Any],
    messages: Sequence[Mapping[str, str]],
    replies: Sequence[str] | Reply,
    *,
    isolated: bool = False,
    template: str = PLAIN,
    reason: Any = "stop",
    **changes: Any,
) -> Record:
    """replies: what the model says, turn by turn, or how it answers the text so far."""
    said = iter(()) if callable(replies) else iter(replies)

    def reply(request: Any) -> Any:
        text = replies(tokenizer().decode(request.token_ids)) if callable(replies) else next(said)
        ids = tokenizer().encode(text).tolist()
        return completed(request, [*ids, END] if reason == "stop" else ids, reason)

    async def body() -> Record:
        registry = Registry({"x": factory}, processes=2)
        environment = registry.resolve(Environment(name="x"))
        if isinstance(environment, Isolated) and not isolated:
            environment = factory
        form = chat(template)
        asked = Group(
            id="g",
            messages=tuple(messages),
            trajectory_ids=("t",),
            sampling=Sampling(max_tokens=4096),
            environment=Environment(name="x", config=dict(config)),
            budget=Budget(**changes.pop("budget", {})),
        )
        submit = SubmitBatch(id="s", batch_id="b", groups=(asked,))
        submit = with_prompts(submit, form, ask(submit, registry.resolve))
        engine = AsyncEngine(StubEngine(reply))
        await engine.start()
        try:
            return await Rollout(
                spec(submit.groups[0], **changes),
                engine=engine,
                environment=environment,
                model=MODEL,
                on_turn=print,
                tokenizer=tokenizer(),
                chat=form,
            ).run()
        finally:
            await registry.close()

    record: Record = run(body())
    return record


def text(record: Record) -> str:
    return tokenizer().decode(record.segments[0].token_ids)
