"""Messages of any client in one form."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.chat.errors import ChatError
from rollout.chat.messages import checked_messages, checked_prompt, checked_tools

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("x", "x"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], ""),
    ],
)
def test_content_is_text(content: Any, text: str) -> None:
    """None beside calls, and lists, make some templates fail and others print nothing."""
    calls = [{"function": {"name": "f", "arguments": {}}}]
    (message,) = checked_messages([{"role": "assistant", "content": content, "tool_calls": calls}])
    assert message == {"role": "assistant", "content": text, "tool_calls": calls}


def test_missing_content_is_none() -> None:
    assert checked_messages([{"role": "assistant"}])[0]["content"] == ""


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user<|im_end|>", "content": "x"}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "text": "x"}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]"),
    ],
)
def test_what_is_wrong_is_named(message: Any, field: str) -> None:
    with pytest.raises(ChatError) as refused:
        checked_messages([USER, message])
    assert refused.value.field == field


def test_a_prompt_asks_for_an_answer() -> None:
    assert checked_prompt([USER]) == (USER,)
    for messages, field in (([], "messages"), ([USER, {"role": "assistant", "content": "x"}], "messages[1]")):
        with pytest.raises(ChatError) as refused:
            checked_prompt(messages)
        assert refused.value.field == field


def test_tools_with_and_without_their_envelope() -> None:
    function = {"name": "f", "parameters": {}}
    whole = {"type": "function", "function": function}
    assert checked_tools([whole, function]) == (whole, whole)
    for wrong in ({}, {"function": {}}, {"function": 5}, {"name": ""}, "f"):
        with pytest.raises(ChatError) as refused:
            checked_tools([whole, wrong])  # type: ignore[list-item]
        assert refused.value.field == "tools[1]"
