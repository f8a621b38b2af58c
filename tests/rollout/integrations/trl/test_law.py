from __future__ import annotations

import pytest

from rollout.client import sampling
from rollout.integrations.trl import encode_prompt, law
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


def test_arguments_for_trls_own_generation_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="top_k"):
        law(arguments(generation_kwargs={"top_k": 5}))


def test_prompts_are_texts_or_messages() -> None:
    assert encode_prompt(ByteTokenizer(), "hi") == list(b"hi")
    assert encode_prompt(ByteTokenizer(), [{"role": "user", "content": "hi"}]) == list(b"uhia")
    assert encode_prompt(ByteTokenizer(), [{"role": "user", "content": "hi"}], thinking=True) == list(b"uhiathinking")
