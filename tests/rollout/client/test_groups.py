"""From lists, arrays and dicts to groups, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocols import BadRequest, Budget, Environment, Group, Sampling, Template
from rollout.client import sampling, turn
from rollout.client.groups import GroupMaker, Law


@pytest.fixture
def group() -> Callable[..., Group]:
    return GroupMaker().group


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.uint16), range(1, 4)]
)
def test_prompts_may_be_lists_or_arrays(group: Callable[..., Group], ids: Any) -> None:
    made = group(ids)
    assert made.prompt.dtype == np.int32
    assert made.prompt.tolist() == [1, 2, 3]


MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "f", "parameters": {"type": "object"}}]


def test_messages_instead_of_a_prompt(group: Callable[..., Group]) -> None:
    made = group(messages=MESSAGES, tools=TOOLS, template_options={"enable_thinking": False}, on_user_turn="drop")
    assert made.messages == tuple(MESSAGES)
    assert made.tools == tuple(TOOLS)
    assert made.template == Template(options={"enable_thinking": False}, on_user_turn="drop")
    assert len(made.prompt) == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt_ids"),
        ({"prompt_ids": [1], "messages": MESSAGES}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": "hi"}, "messages[0]"),
        ({"prompt_ids": [1], "tools": TOOLS}, "tools"),
        ({"messages": MESSAGES, "tools": [TOOLS[0], len]}, "tools[1]"),
        ({"prompt_ids": [1], "on_user_turn": "drop"}, "template"),
        ({"messages": MESSAGES, "on_user_turn": "forget"}, "on_user_turn"),
        ({"messages": MESSAGES, "prompt_source": [0]}, "prompt_source"),
    ],
)
def test_a_prompt_or_messages(group: Callable[..., Group], arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        group(**arguments)
    assert refused.value.field == field


def test_a_prompt_is_copied(group: Callable[..., Group]) -> None:
    ids = np.array([1, 2], np.int32)
    made = group(ids)
    ids[0] = 9
    assert made.prompt.tolist() == [1, 2]


def test_defaults_are_neutral(group: Callable[..., Group]) -> None:
    made = group([1])
    assert made == Group(id=made.id, prompt=np.array([1], np.int32), trajectory_ids=(f"{made.id}.0",))
    assert (made.sampling, made.environment, made.budget) == (Sampling(), Environment(), Budget())


def test_ids_are_unique_over_groups_and_makers(group: Callable[..., Group]) -> None:
    other = GroupMaker().group
    names = [name for make in (group, other) for _ in range(50) for name in make([1], n=2).trajectory_ids]
    assert len(set(names)) == len(names)
    named = group([1], n=3, id="g")
    assert named.trajectory_ids == ("g.0", "g.1", "g.2")
    assert group([1], n=2, trajectory_ids=["a", "b"]).trajectory_ids == ("a", "b")


def test_every_field_arrives(group: Callable[..., Group]) -> None:
    made = group(
        [1, 2],
        n=2,
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=2,
        presence_penalty=-1,
        frequency_penalty=1,
        allowed_ids=[4, 5],
        logit_bias={7: 1.5, 3: -2},
        seed=2**63,
        max_tokens=9,
        stop_ids=[6],
        stop="end",
        ignore_eos=True,
        logprobs=["raw", "processed"],
        top_logprobs=2,
        prompt_logprobs=True,
        environment="tools",
        config={"a": [1]},
        max_turns=4,
        max_total_tokens=100,
        turn_deadline_s=1,
        tool_deadline_s=2,
        trajectory_deadline_s=3,
        on_length="end",
        metadata={"k": np.int64(1)},
        purpose="eval",
        priority=-1,
        min_version=5,
        max_staleness=1,
        sample_indices=[4, 2],
        prompt_source=[0, 1],
    )
    law = made.sampling
    assert (law.temperature, law.top_k, law.top_p, law.min_p, law.seed) == (0.5, 3, 0.75, 0.25, 2**63)
    assert (law.repetition_penalty, law.presence_penalty, law.frequency_penalty) == (2.0, -1.0, 1.0)
    assert law.bias_ids is not None
    assert law.bias_values is not None
    assert law.allowed_ids is not None
    assert (law.bias_ids.tolist(), law.bias_values.tolist(), law.allowed_ids.tolist()) == ([3, 7], [-2.0, 1.5], [4, 5])
    assert (law.max_tokens, law.stop_ids, law.stop, law.ignore_eos) == (9, (6,), ("end",), True)
    assert (law.logprobs, law.top_logprobs, law.prompt_logprobs) == (("raw", "processed"), 2, True)
    assert made.environment == Environment(name="tools", config={"a": [1]})
    assert made.budget == Budget(
        max_turns=4,
        max_total_tokens=100,
        turn_deadline_s=1.0,
        tool_deadline_s=2.0,
        trajectory_deadline_s=3.0,
        on_length="end",
    )
    assert (made.metadata, made.purpose, made.priority) == ({"k": 1}, "eval", -1)
    assert (made.min_version, made.max_staleness, made.sample_indices) == (5, 1, (4, 2))
    assert made.prompt_source is not None
    assert made.prompt_source.tolist() == [0, 1]


def test_scripts_mix_plain_observations_and_turns(group: Callable[..., Group]) -> None:
    first, second = group([1], script=[[2, 3], turn(glue=[4], max_tokens=5)]).environment.script
    assert first.observation is not None
    assert second.glue is not None
    assert (first.observation.tolist(), first.glue) == ([2, 3], None)
    assert (second.observation, second.glue.tolist(), second.max_tokens) == (None, [4], 5)


@pytest.mark.parametrize("entry", [5, None, 1.5, np.int64(3), {"observation": [5]}])
def test_a_script_has_a_list_for_each_turn_and_says_so(group: Callable[..., Group], entry: Any) -> None:
    with pytest.raises(
        BadRequest, match=r"what follows one turn, a list of token ids or a turn\(\.\.\.\), not"
    ) as refused:
        group([1], script=[[2], entry])
    assert refused.value.field == "script[1]"


def test_a_script_may_be_an_array(group: Callable[..., Group]) -> None:
    script = group([1], script=np.array([[2, 3], [4, 5]])).environment.script
    assert [entry.observation.tolist() for entry in script if entry.observation is not None] == [[2, 3], [4, 5]]


def test_an_environment_may_be_given_whole(group: Callable[..., Group]) -> None:
    environment = Environment(name="x", config={"a": 1})
    assert group([1], environment=environment).environment is environment


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1.5]}, "prompt_ids"),
        ({"prompt_ids": [[1]]}, "prompt_ids"),
        ({"prompt_ids": [[1], [1, 2]]}, "prompt_ids"),
        ({"prompt_ids": "text"}, "prompt_ids"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"prompt_ids": [2**31]}, "prompt_ids"),
        ({"prompt_ids": [2**70]}, "prompt_ids"),
        ({"prompt_ids": [True]}, "prompt_ids"),
        ({"n": 0}, "n"),
        ({"n": 2**40}, "n"),
        ({"n": 2, "trajectory_ids": ["a"]}, "trajectory_ids"),
        ({"n": 2, "trajectory_ids": ["a", "a"]}, "trajectory_ids"),
        ({"n": 2, "sample_indices": [1, 1]}, "sample_indices"),
        ({"id": ""}, "id"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": "none"}, "logprobs"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"allowed_ids": ["a"]}, "allowed_ids"),
        ({"max_turns": 0}, "max_turns"),
        ({"tool_deadline_s": 0}, "tool_deadline_s"),
        ({"purpose": "test"}, "purpose"),
        ({"metadata": {"a": object()}}, "metadata"),
        ({"metadata": {1: 2}}, "metadata"),
        ({"prompt_source": [0, 1]}, "prompt_source"),
        ({"environment": "x", "script": [[1]]}, "script"),
        ({"config": {"hidden": 3}}, "config"),
        ({"environment": Environment(), "script": [[1]]}, "environment"),
        ({"environment": {"name": "x"}}, "environment"),
        ({"environment": ""}, "environment"),
        ({"script": [turn([1]), [1.5]]}, "script[1]"),
        ({"script": [1, 2]}, "script[0]"),
    ],
)
def test_what_is_wrong_is_named(group: Callable[..., Group], options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        group(**({"prompt_ids": [1]} | options))
    assert field in (refusal.value.field or "")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("logit_biass", "logit_bias"), ("max_turn", "max_turns"), ("prompt", "prompt_ids")],
)
def test_a_misspelt_option_is_told_what_it_may_have_meant(group: Callable[..., Group], name: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=rf"^unknown field; did you mean {meant}\? \[{name}\]$"):
        group([1], **{name: 1})


def test_a_law_of_its_own_knows_no_option_of_a_group() -> None:
    with pytest.raises(BadRequest, match=r"did you mean min_p\?"):
        sampling(min_pp=0.5)  # type: ignore[call-arg]
    with pytest.raises(BadRequest, match=r"^unknown field \[script\]$"):
        sampling(script=[[1]])  # type: ignore[call-arg]


def test_a_law_has_the_options_of_the_wire() -> None:
    assert Law.__annotations__.keys() == Sampling.model_fields.keys() - {"bias_ids", "bias_values"} | {"logit_bias"}


def test_a_law_of_its_own() -> None:
    assert sampling() == Sampling()
    assert sampling(stop_ids={7}, stop=["a", "b"], allowed_ids=None) == Sampling(stop_ids=(7,), stop=("a", "b"))
    with pytest.raises(BadRequest):
        sampling(min_p=2)
