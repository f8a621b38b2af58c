"""What an environment is told: all of its trajectory, and nothing that it could change for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from protocols.fields import Environment, Group, Partial, Template
from rollout.chat.messages import all_as_json
from rollout.environments.base import Context, TurnResult
from rollout.trajectory.context import context_of
from rollout.trajectory.spec import TrajectorySpec
from tests.protocols import samples
from tests.rollout.build import MODEL, group, spec
from tests.rollout.chat.tiny import chat, tokenizer

USER = {"role": "user", "content": "hello", "extra": {"list": [1]}}


async def ask(turn: TurnResult) -> Any:
    raise AssertionError(turn)


def talk(**fields: Any) -> Group:
    return Group(id="g", messages=(USER,), trajectory_ids=("t",), **fields)


def told(of: TrajectorySpec, form: Any = None) -> Context:
    return context_of(of, MODEL, ask=ask, tokenizer=tokenizer(), chat=form)


def test_it_says_what_the_trajectory_is() -> None:
    asked = Environment(name="other", config={"a": [1]})
    of = spec(group(environment=asked, metadata={"m": {"n": 1}}, purpose="eval"))
    context = told(of)
    assert (context.trajectory_id, context.group_id, context.sample_index, context.seed) == ("t", "g", 1, 7)
    assert (context.vocab_size, context.max_context, context.purpose) == (512, 64, "eval")
    assert (context.metadata, context.config) == ({"m": {"n": 1}}, {"a": [1]})
    assert context.prompt.tolist() == [10, 11, 12]
    assert (context.ask, context.tokenizer, context.chat) == (ask, tokenizer(), None)


def test_what_an_environment_does_to_it_changes_nothing_for_others() -> None:
    asked = Environment(name="other", config={"a": [1]})
    of = spec(talk(environment=asked, metadata={"m": {"n": 1}}).model_copy(update={"prompt": np.array([3], np.int32)}))
    form = chat()
    first: Any = told(of, form)
    first.metadata["m"]["n"] = 2
    first.config["a"].append(2)
    first.prompt[0] = 9
    first.chat.messages[0]["extra"]["list"].append(2)
    first.chat.messages.append("rubbish")
    second = told(of, form)
    assert (second.metadata, second.config, second.prompt.tolist()) == ({"m": {"n": 1}}, {"a": [1]}, [3])
    assert second.chat is not None
    assert second.chat.messages == [USER]
    assert of.group.messages == (USER,)


@pytest.mark.parametrize(
    ("template", "branches"), [({}, False), ({"on_user_turn": "drop"}, True), ({"on_unstable": "branch"}, True)]
)
def test_a_conversation_is_that_of_its_group(template: dict[str, Any], branches: bool) -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    asked = Template(options={"enable_thinking": False}, **template)
    form = chat()
    context = told(spec(talk(tools=tools, template=asked)), form)
    assert context.chat is not None
    assert context.chat.form is form.form(tools, {"enable_thinking": False}), "its proofs are shared"
    assert (context.chat.may_branch, context.chat.length) == (branches, 0)


def test_a_conversation_that_goes_on_holds_what_was_said() -> None:
    said = ({"role": "assistant", "content": "ä"}, {"role": "user", "content": "more"})
    texts = all_as_json(said)
    assert texts is not None
    partial = Partial(answered=True, messages=np.frombuffer(b"[" + b",".join(texts) + b"]", np.uint8))
    before = samples.record().model_copy(update={"partial": partial})
    context = told(spec(talk(), before=before), chat())
    assert context.chat is not None
    assert context.chat.messages == [USER, *said]
    assert (context.chat.length, context.chat.said(1)) == (2, texts[1:])


def test_where_the_checkpoint_has_no_template_or_the_group_no_messages_there_is_no_conversation() -> None:
    assert told(spec(talk())).chat is None
    assert told(spec(group()), chat()).chat is None
