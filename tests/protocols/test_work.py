"""What belongs together in the work that is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from protocols import Budget, Environment, Group, Sampling, ScriptedTurn, Template, bad_request
from tests.protocols.samples import floats, ids, marks


def refused_field(model: type, **fields: Any) -> str | None:
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    return bad_request(caught.value).field


def group(**fields: Any) -> dict[str, Any]:
    return {"id": "g", "prompt": ids(1, 2, 3), "trajectory_ids": ("a", "b")} | fields


def test_defaults_of_the_law_are_neutral() -> None:
    law = Sampling()
    assert (law.temperature, law.top_k, law.top_p, law.min_p, law.repetition_penalty) == (1, 0, 1, 0, 1)
    assert (law.presence_penalty, law.frequency_penalty, law.seed, law.max_tokens) == (0, 0, None, None)
    assert law.logprobs == ("processed",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("top_logprobs", 65),
        ("stop_ids", (1,) * 65),
        ("logprobs", ()),
        ("logprobs", ("raw", "raw")),
    ],
)
def test_sampling_ranges(field: str, value: Any) -> None:
    assert refused_field(Sampling, **{field: value}) == field


def test_sampling_lists_name_the_entry() -> None:
    assert refused_field(Sampling, stop=("ok", "")) == "stop[1]"
    assert refused_field(Sampling, stop_ids=(1, -1)) == "stop_ids[1]"
    assert refused_field(Sampling, logprobs=("untempered",)) == "logprobs[0]"


@pytest.mark.parametrize(
    "bias",
    [
        {"bias_ids": ids(1)},
        {"bias_values": floats(1)},
        {"bias_ids": ids(1, 2), "bias_values": floats(1)},
        {"bias_ids": ids(1), "bias_values": floats(float("nan"))},
        {"bias_ids": ids(1), "bias_values": floats(float("inf"))},
    ],
    ids=["no values", "no ids", "lengths", "nan", "inf"],
)
def test_bias_is_two_arrays_of_one_length(bias: dict[str, Any]) -> None:
    assert refused_field(Sampling, **bias) == "bias_values"
    Sampling(bias_ids=ids(1), bias_values=floats(-1))


def test_only_a_scripted_environment_has_a_script() -> None:
    script = (ScriptedTurn(observation=ids(1)),)
    assert Environment(script=script).name == "scripted"
    assert refused_field(Environment, name="remote", script=script) == "script"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ids()),
        ("trajectory_ids", ()),
        ("trajectory_ids", ("a", "a")),
        ("sample_indices", (1,)),
        ("sample_indices", (1, 1)),
        ("prompt_source", marks(0, 0)),
        ("prompt_source", marks(0, 0, 5)),
        ("max_staleness", -1),
        ("id", ""),
    ],
)
def test_group_fields_fit_together(field: str, value: Any) -> None:
    assert refused_field(Group, **group(**{field: value})) == field
    Group(**group(sample_indices=(7, 0), prompt_source=marks(0, 1, 4)))


@pytest.mark.parametrize("field", ["turn_deadline_s", "tool_deadline_s", "trajectory_deadline_s"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_deadlines_are_positive_and_finite(field: str, value: float) -> None:
    assert refused_field(Budget, **{field: value}) == field


def test_a_nested_mistake_has_its_whole_path() -> None:
    with pytest.raises(ValidationError) as caught:
        Group(**group(environment={"script": [{"observation": np.zeros(2)}]}))
    assert bad_request(caught.value).field == "environment.script[0].observation"


MESSAGES = ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"prompt": ids(), "messages": None}, "prompt"),
        ({"messages": MESSAGES}, "prompt"),
        ({"prompt": ids(), "messages": ()}, "messages"),
        ({"prompt": ids(), "messages": MESSAGES, "prompt_source": marks()}, "prompt_source"),
        ({"tools": ({"name": "f"},)}, "tools"),
        ({"template": Template(on_user_turn="drop")}, "template"),
        ({"prompt": ids(), "messages": ("hi",)}, "messages[0]"),
    ],
)
def test_a_group_has_a_prompt_or_messages(fields: dict[str, Any], refused: str) -> None:
    assert refused_field(Group, **group(**fields)) == refused


def test_messages_need_no_prompt() -> None:
    chat = Group(**{**group(messages=MESSAGES), "prompt": ids()})
    assert chat.messages == MESSAGES
    assert len(chat.prompt) == 0
    assert Group(id="g", messages=MESSAGES, trajectory_ids=("a",)) == Group(
        id="g", messages=MESSAGES, trajectory_ids=("a",), template=Template()
    )


def test_a_group_is_complete_by_what_was_asked_for_and_never_by_more_than_there_are() -> None:
    fresh, resumed = Group(**group()), Group(**group(counted=3))
    assert [fresh.needed(least, 2) for least in (None, 1, 2, 5)] == [2, 1, 2, 2]
    assert [resumed.needed(least, 2) for least in (None, 1, 5, 9)] == [5, 1, 5, 5]


def test_only_a_plug_in_has_a_state_in_the_worker() -> None:
    assert [Environment(name=name).stateless for name in ("scripted", "remote", "tools")] == [True, True, False]
