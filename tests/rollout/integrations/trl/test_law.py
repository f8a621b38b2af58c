from __future__ import annotations

from typing import Any

import pytest

from rollout.client import sampling
from rollout.integrations.trl import encode_prompt, law
from rollout.integrations.trl.law import warn_of_filters
from tests.rollout.integrations.trl.stubs import ByteTokenizer, arguments


def test_trls_defaults_are_the_neutral_law() -> None:
    assert sampling(**law(arguments())) == sampling(max_tokens=4)


@pytest.mark.parametrize("off", [None, 0, -1])
def test_every_way_to_switch_top_k_off(off: int | None) -> None:
    assert law(arguments(top_k=off))["top_k"] == 0


def test_what_is_set_is_sampled_from() -> None:
    found = law(
        arguments(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, max_completion_length=9)
    )
    expected = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 9}
    assert found == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, None),
        ({"temperature": 0.5}, None),
        ({"top_k": 50}, "top_k"),
        ({"top_p": 0.9, "allowed_ids": [1, 2]}, "top_p, allowed_ids"),
        ({"logit_bias": {1: 2.0}}, "bias_ids"),
        ({"top_k": 50, "logprobs": "temperature"}, None),
    ],
)
def test_a_law_that_trl_does_not_score_is_told(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], named: str | None
) -> None:
    warn_of_filters(sampling(**options))
    assert caplog.text == "" if named is None else f"{named}: TRL scores without" in caplog.text


def test_arguments_for_trls_own_generation_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="top_k"):
        law(arguments(generation_kwargs={"top_k": 5}))


def test_prompts_are_texts_or_messages() -> None:
    assert encode_prompt(ByteTokenizer(), "hi") == list(b"hi")
    assert encode_prompt(ByteTokenizer(), [{"role": "user", "content": "hi"}]) == list(b"uhia")
    assert encode_prompt(ByteTokenizer(), [{"role": "user", "content": "hi"}], thinking=True) == list(b"uhiathinking")
