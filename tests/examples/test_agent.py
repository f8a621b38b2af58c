"""The agent example: its transcript tells where each token came from, and the real model finds the answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.agent.__main__ import STYLES, call, main, messages, transcript
from examples.agent.tools import fahrenheit, reward, temperature
from rollout.tools.environment import Episode
from rollout.tools.modules import environment_of
from rollout.tools.parse import Call, read
from rollout.tools.run import Result
from tests.rollout.chat.tiny import ids, tokenizer


def test_its_examples_call_the_tools_as_they_are() -> None:
    tools = {tool.name: tool for tool in environment_of(["examples.agent.tools"]).tools}
    assert set(tools) == {"temperature", "fahrenheit"}
    said = [m["content"] for m in messages("Rome") if m["role"] == "assistant" and "<tool_call>" in m["content"]]
    assert len(said) == 6
    for text in said:
        (made,) = read(text).calls
        assert isinstance(made, Call)
        assert set(made.arguments) == set(tools[made.name].parameters["properties"])
    assert read(call("temperature", city="Rome")).calls == (Call("temperature", {"city": "Rome"}),)


def test_a_city_without_a_station() -> None:
    assert temperature("rome") == {"city": "rome", "celsius": 24}
    with pytest.raises(ValueError, match="no station"):
        temperature("Atlantis")


@pytest.mark.parametrize(("answer", "total"), [("It is 75.2.", 0.75), ("It is 24.", 0.25)])
def test_the_reward(answer: str, total: float) -> None:
    context: Any = SimpleNamespace(metadata={"answer": fahrenheit(24)})
    results = (Result("temperature", "24"), Result("fahrenheit", "error", "raised"))
    assert sum(reward(Episode((), answer, results, context)).values()) == total


def test_the_transcript_is_coloured_by_source() -> None:
    parts = [("prompt", 0), ("said", 1), ("glue", 2), ("seen", 3), ("said", 1)]
    token_ids = np.concatenate([ids(text) for text, _ in parts]).astype(np.int32)
    source = np.concatenate([[kind] * len(ids(text)) for text, kind in parts]).astype(np.uint8)
    of: Any = SimpleNamespace(token_ids=token_ids, source=source, prompt_len=len(ids("prompt")))
    text = transcript(of, tokenizer(), tail=2)
    styled = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert styled[1:] == [(name, STYLES[kind]) for name, kind in parts[1:]]
    assert text.plain.startswith("...")
    assert "prompt".endswith(styled[0][0])


@pytest.mark.stress
@pytest.mark.realmodel
@pytest.mark.timeout(900)
def test_three_turns_with_two_tools(smollm2_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Rome", "--checkpoint", str(smollm2_checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert "It is 75.2 degrees Fahrenheit in Rome." in printed
    assert "turn 2: " in printed
    assert "reward 1.0" in printed
