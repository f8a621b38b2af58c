"""The real tokenizer and templates: every constructed case of drift, as a trajectory that does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from protocols.fields import SOURCE_SAMPLED, Budget, Environment, Group, Record, Sampling, Template
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat
from rollout.chat.messages import checked_messages
from rollout.chat.template import ChatTemplate
from rollout.chat.tokenizer import Tokenizer
from rollout.environments.base import Context, Step, TurnResult
from rollout.environments.base import Environment as Base
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests.rollout.build import MODEL, spec
from tests.rollout.chat.qwen3 import cases, qwen3, templates
from tests.rollout.stub_engine import StubEngine, completed
from tests.rollout.tools.play import rendered_by

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(600)]

END, OTHER_END = 151645, 151643
QWEN3 = MODEL.model_copy(update={"vocab_size": 151936, "max_context": 4096, "eos_ids": (END, OTHER_END)})
TURNS: list[dict[str, Any]] = cases()["turns"]
RETOKENIZED: list[dict[str, Any]] = cases()["retokenized"]


@cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(qwen3())
    assert loaded is not None
    return loaded


@cache
def chat() -> ChatFormat:
    loaded = ChatFormat.load(qwen3(), tokenizer())
    assert loaded is not None
    return loaded


@cache
def library() -> Any:
    return AutoTokenizer.from_pretrained(qwen3())


def tools_of(case: dict[str, Any]) -> Any:
    return cases()["tools"] if case["tools"] else []


def library_ids(messages: Sequence[dict[str, Any]], case: dict[str, Any]) -> list[int]:
    made: list[int] = library().apply_chat_template(
        list(messages),
        tools=tools_of(case) or None,
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
        **case["options"],
    )
    return made


def follows(messages: Sequence[dict[str, Any]]) -> type[Base]:
    class Follows(Base):
        """Says `messages` after the first turn, and ends after the second."""

        on_length = "continue"

        async def reset(self, context: Context) -> None:
            self.chat = context.chat

        async def step(self, turn: TurnResult) -> Step:
            assert self.chat is not None
            return await self.chat.follow(turn, *(messages if turn.index == 0 else ()))

    return Follows


async def trajectory(case: dict[str, Any], sampled: list[int], **template: Any) -> Record:
    replies = iter([sampled, [9707, END]])
    cut = sampled[-1] not in (END, OTHER_END)

    def reply(request: Any) -> Any:
        said = next(replies)
        return completed(request, said, "length" if cut and said is sampled else "stop")

    group = Group(
        id="g",
        messages=tuple(case["messages"]),
        tools=tuple(tools_of(case)),
        template=Template(options=case["options"], **template),
        trajectory_ids=("t",),
        sampling=Sampling(max_tokens=len(sampled)),
        budget=Budget(),
        environment=Environment(name="follows"),
    )
    make = follows(case["follow_up"])
    engine = AsyncEngine(StubEngine(reply))
    await engine.start()
    rollout = Rollout(
        spec(rendered_by(chat(), group, make)),
        engine=engine,
        environment=make,
        model=QWEN3,
        on_turn=print,
        tokenizer=tokenizer(),
        chat=chat(),
    )
    return await rollout.run()


@pytest.mark.parametrize("case", TURNS, ids=lambda case: case["name"])
def test_a_turn_that_rendering_again_would_change_is_extended(case: dict[str, Any]) -> None:
    sampled, prompt = case["sampled_ids"], library_ids(case["messages"], case)
    record = asyncio.run(trajectory(case, sampled))
    assert record.finish_reason == "env_done", record.error
    (segment,) = record.segments
    held = prompt + sampled
    assert segment.token_ids[: len(held)].tolist() == held
    second = segment.turns[1].start
    added = segment.token_ids[len(held) : second].tolist()
    # The library's own text after a turn, whatever it does to the turn itself.
    again = library_ids([*case["messages"], case["assistant"], *case["follow_up"]], case)
    common = next((i for i, (one, other) in enumerate(zip(held, again, strict=False)) if one != other), len(held))
    assert len(held) - common == case["drift_tokens"], "the case is none"
    closing = 0 if sampled[-1] == END else 1
    assert added == again[-len(added) :]
    assert again[-len(added) - 1 + closing] == END
    mask = np.zeros(len(segment.token_ids), np.uint8)
    mask[len(prompt) : len(held)] = mask[second:] = 1
    assert segment.loss_mask.tolist() == mask.tolist()
    assert (segment.source == SOURCE_SAMPLED).tolist() == mask.tolist()
    assert not segment.logprobs[mask == 0].any()


@pytest.mark.parametrize("case", TURNS, ids=lambda case: case["name"])
def test_dropping_what_the_template_drops_is_a_branch_that_equals_its_rendering(case: dict[str, Any]) -> None:
    """Only where a user speaks. What the branch holds is the template's rendering of what was said."""
    record = asyncio.run(trajectory(case, case["sampled_ids"], on_user_turn="drop"))
    assert record.finish_reason == "env_done", record.error
    if case["follow_up"][0]["role"] != "user" or case["drift_tokens"] == 0:
        assert len(record.segments) == 1
        return
    first, second = record.segments
    assert first.loss_mask.sum() == len(case["sampled_ids"])
    text = tokenizer().decode(np.array(case["sampled_ids"][:-1], np.int32))
    said = {"role": "assistant", "content": text}
    expected = library_ids([*case["messages"], said, *case["follow_up"]], case)
    assert second.token_ids[: second.turns[0].start].tolist() == expected
    assert second.loss_mask.tolist() == [0] * len(expected) + [1, 1]


@pytest.mark.parametrize("case", RETOKENIZED, ids=lambda case: case["name"])
def test_ids_that_encode_otherwise_stay_as_they_were_sampled(case: dict[str, Any]) -> None:
    turn = {**TURNS[0], "follow_up": [{"role": "user", "content": "x"}]}
    record = asyncio.run(trajectory(turn, [*case["ids"], END]))
    (segment,) = record.segments
    start = segment.turns[0].start
    assert segment.token_ids[start : start + len(case["ids"])].tolist() == case["ids"]
    assert tokenizer().decode(case["ids"]) == case["text"]
    plain = "".join(chr(c) for c in range(32, 127))
    assert tokenizer().encode(plain).tolist() == library().encode(plain, add_special_tokens=False)


def test_a_results_control_tokens_are_text() -> None:
    injection: Any = cases()["injection"]
    assert tokenizer().encode(injection["text"]).tolist() == injection["ids"]
    suffix = chat().form().suffix([{"role": "tool", "content": injection["text"]}])
    inside = suffix.observation.tolist()
    assert inside[: len(injection["ids"]) - 1] == injection["ids"][:-1]
    assert END not in inside
    assert suffix.opening.tolist().count(END) == 1


def test_null_content_beside_calls() -> None:
    """This revision of the template fails on it."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "21"}]},
    ]
    prompt = chat().form().prompt(checked_messages(messages))
    messages[1]["content"], messages[2]["content"] = "", "21"
    assert prompt.tolist() == library_ids(messages, TURNS[0])


STABLE = (
    "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8",
    "qwen3_vl", "qwen2_5", "qwen2_5_training", "llama3", "llama3_1", "llama3_2", "lfm2", "glm4moe",
)  # fmt: skip
USERS_ONLY = ("gemma", "gemma3", "cohere", "deepseek_r1_distill")
UNSTABLE = ("phi3", "phi3_5")
USER, TOOL = {"role": "user", "content": "hi."}, {"role": "tool", "content": "42.", "name": "tool"}


def of(name: str) -> Any:
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return ChatFormat(ChatTemplate({"default": templates()[name]}, named), tokenizer()).form()


@pytest.mark.parametrize("name", [*STABLE, *USERS_ONLY, *UNSTABLE])
def test_which_known_templates_can_be_appended_to(name: str) -> None:
    """With Qwen's tokenizer, to which the control tokens of other families are text."""
    form = of(name)
    for message, stable in ((USER, name not in UNSTABLE), (TOOL, name in STABLE)):
        if stable:
            suffix = form.suffix([message])
            text = tokenizer().decode(np.concatenate([suffix.observation, suffix.opening]))
            assert str(message["content"]) in text
        else:
            with pytest.raises(ChatError):
                form.suffix([message])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507"])
def test_prompts_of_other_revisions_are_the_librarys(name: str) -> None:
    for case in TURNS[:9]:
        messages = [*case["messages"], case["assistant"], *case["follow_up"]]
        expected = library().apply_chat_template(
            messages,
            chat_template=templates()[name],
            tools=tools_of(case) or None,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            **case["options"],
        )
        named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        form = ChatFormat(ChatTemplate({"default": templates()[name]}, named), tokenizer())
        made = form.form(tools_of(case), case["options"]).prompt(checked_messages(messages))
        assert made.tolist() == expected
