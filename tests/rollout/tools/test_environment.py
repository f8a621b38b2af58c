"""The environment `tools`: what it offers, when it ends, what it is worth."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import PlainValidator

from protocols.errors import BadRequest
from protocols.fields import Turn
from rollout.chat.conversation import Conversation
from rollout.environments.base import Context, TurnResult
from rollout.tools.environment import Episode, ToolEnvironment
from rollout.tools.tool import Tool
from tests.rollout.chat.tiny import THINKING, chat, ids, tokenizer
from tests.rollout.tools.play import END, chat_group, observed, play, rendered, run
from tests.rollout.tools.sample_tools import give, lookup, never

Number = Annotated[int, PlainValidator(int)]
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": 4}}</tool_call>'


class Base(ToolEnvironment):
    tools = (lookup, give, never)
    deadline_s = 0.2


def prompt_of(make: Any, **fields: Any) -> str:
    return tokenizer().decode(rendered(chat_group(**fields), make).prompt)


def test_a_configuration_picks_tools() -> None:
    assert '"lookup"' in prompt_of(Base)
    text = prompt_of(Base, config={"tools": ["give"]})
    assert '"give"' in text
    assert '"lookup"' not in text
    record = run(play(Base, CALL, "ok", config={"tools": ["give"]}))
    assert "error: there is no tool 'lookup'; known: give" in observed(record)[0]


@pytest.mark.parametrize("tools", [["nobody"], "lookup", [5]])
def test_a_wrong_configuration_is_refused_by_name(tools: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        rendered(chat_group(config={"tools": tools}), Base)
    assert refused.value.field == "groups[0].environment.config.tools"


def test_schemas_and_functions_may_be_given_apart() -> None:
    class Named(ToolEnvironment):
        tools = (Tool("find", "Find it.", {"type": "object", "properties": {"key": {"type": "integer"}}}, lookup),)

    assert '"find"' in prompt_of(Named)
    record = run(play(Named, CALL.replace("lookup", "find"), "ok"))
    assert '{"celsius": 4}' in observed(record)[0]


def test_a_schema_of_ones_own_takes_what_none_is_made_of() -> None:
    """A type that has no JSON schema, and arguments of any name."""

    async def find(key: Number, **others: Any) -> Any:
        return key, sorted(others)

    with pytest.raises(ValueError, match="find: 'others' must be a parameter"):
        Tool.of(find)

    class Named(ToolEnvironment):
        tools = (Tool("find", "Find it.", {"type": "object", "required": ["key", "place"]}, find),)

    said = ('{"key": "4", "place": "here", "x": 1}', '{"key": 4}', '{"key": "four", "place": "here"}')
    calls = (f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>' for arguments in said)
    record = run(play(Named, "".join(calls), "ok"))
    text = observed(record)[0]
    assert '[4, ["place", "x"]]' in text
    assert "bad arguments: place: Field required" in text
    assert "bad arguments: key: " in text


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_sees_the_episode(kind: str) -> None:
    seen: list[Episode] = []

    class Scored(Base):
        if kind == "def":

            def reward(self, episode: Episode) -> Any:
                seen.append(episode)
                return {"format": 0.25, "answer": 0.5}
        else:

            async def reward(self, episode: Episode) -> Any:
                await asyncio.sleep(0)
                seen.append(episode)
                return {"format": 0.25, "answer": 0.5}

    record = run(play(Scored, f"<think>hm</think>{CALL}", "<think>so</think>\n\nit is 4", metadata={"key": 4}))
    assert (record.reward, record.rewards) == (0.75, {"format": 0.25, "answer": 0.5})
    (episode,) = seen
    assert episode.answer == "it is 4"
    assert [(result.name, result.text, result.problem) for result in episode.results] == [
        ("lookup", '{"celsius": 4}', None)
    ]
    roles = [message["role"] for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert episode.context.metadata == {"key": 4}
    assert episode.record is not None
    assert episode.record.status == "completed"


def test_without_a_reward_nobody_scored() -> None:
    assert run(play(Base, "bye")).reward is None


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_user_who_answers(kind: str) -> None:
    class Talks(Base):
        if kind == "def":

            def reply(self, episode: Episode) -> Any:
                return f"and after {episode.answer}?" if episode.answer != "bye" else None
        else:

            async def reply(self, episode: Episode) -> Any:
                return f"and after {episode.answer}?" if episode.answer != "bye" else None

    record = run(play(Talks, "one", "<think>x</think>two", "bye"))
    assert (record.finish_reason, len(record.segments[0].turns)) == ("env_done", 3)
    assert ["and after one?" in observed(record)[0], "and after two?" in observed(record)[1]] == [True, True]


@pytest.mark.parametrize("method", ["reward", "reply"])
def test_a_method_that_raises_costs_its_own_trajectory(method: str) -> None:
    def fails(self: Any, episode: Episode) -> None:  # noqa: ARG001
        raise ValueError("no")

    record = run(play(type("Fails", (Base,), {method: fails}), "bye"))
    assert (record.status, record.finish_reason) == ("failed", "env_error")
    assert record.error is not None
    assert "ValueError: no" in record.error.message


def test_a_tool_that_fails_is_no_bad_call() -> None:
    slow, odd = CALL.replace("lookup", "never").replace('"key": 4', ""), CALL.replace("lookup", "give")
    odd = odd.replace('"key": 4', '"what": "nothing"')
    record = run(play(Base, slow, odd, slow, odd, "bye"))
    assert len(record.segments[0].turns) == 5
    assert "error: timeout" in observed(record)[0]
    assert "error: KeyError" in observed(record)[1]


def test_a_template_that_opens_the_reasoning_itself() -> None:
    """A draft before the first `</think>` is one, although no opening tag is to be seen, and may never be closed."""
    opening = THINKING.replace(
        "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
        "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- if enable",
    )
    assert opening != THINKING
    assert len(run(play(Base, f"hm {CALL}", jinja=opening)).segments[0].turns) == 1
    record = run(play(Base, f"hm {CALL}</think>{CALL}", "</think>ok", jinja=opening))
    assert observed(record)[0].count("celsius") == 1


def test_ids_are_refused_where_it_would_go_on_in_messages() -> None:
    class Direct(Base):
        pass

    group = chat_group()
    bare = group.model_copy(update={"messages": None, "prompt": rendered(group, Direct).prompt})
    from rollout.generation.async_engine import AsyncEngine
    from rollout.trajectory.rollout import Rollout
    from tests.rollout.build import spec
    from tests.rollout.stub_engine import StubEngine
    from tests.rollout.tools.play import CONTEXT

    async def main() -> Any:
        engine = AsyncEngine(StubEngine())
        await engine.start()
        return await Rollout(spec(bare), engine=engine, environment=Direct, model=CONTEXT, on_turn=print).run()

    record = run(main())
    assert record.error is not None
    assert "submit messages" in record.error.message


def test_another_one_goes_on_from_its_progress() -> None:
    """The rest of what it knows is in the conversation. Whole trajectories are cut in trajectory/test_state.py."""
    seen: list[Episode] = []

    class Told(Base):
        def reply(self, episode: Episode) -> Any:
            seen.append(episode)
            return ToolEnvironment.reply(self, episode)

    bad = CALL.replace("lookup", "nobody")
    config = {"user": ["first", "second"], "max_bad_calls": 3}
    group = rendered(chat_group(({"role": "user", "content": "hello"}, {"role": "tool", "content": "old"})), Told)

    async def both() -> tuple[Any, ...]:
        one, other = Told(), Told()
        await one.reset(chat_context(group, config))
        told = one._chat
        for text in ("answer", CALL, bad, f"so {bad}"):
            await one.step(turn_of(text))
        progress = json.loads(json.dumps(one.progress()))
        there = chat_context(group, config, tuple(told.messages[len(group.messages or ()) :]))
        await other.go_on(there, progress)
        assert (other._answer, other._bad, other._results) == ("so", 2, one._results)
        return [await each.step(turn_of("more")) for each in (one, other)], await other.step(turn_of(bad))

    (one, other), last = run(both())
    assert one.observation.tolist() == other.observation.tolist()
    assert [tuple(episode.messages) for episode in seen[-2:-1]] == [tuple(seen[-1].messages)]
    assert last.done, "the third bad call in a row, two of them elsewhere"


def chat_context(group: Any, config: Any, said: Any = ()) -> Context:
    return Context(
        trajectory_id="t",
        group_id="g",
        sample_index=0,
        seed=7,
        prompt=group.prompt,
        vocab_size=1000,
        max_context=60_000,
        ask=None,  # type: ignore[arg-type]
        config=config,
        chat=Conversation(chat().form(), group.messages, group.template, said),
    )


def turn_of(text: str) -> TurnResult:
    array = np.array([*ids(text), END], np.int32)
    made = Turn(index=0, start=0, length=len(array), finish_reason="stop", stop=str(END))
    return TurnResult(made, array, np.zeros(len(array), np.float32), len(array))
