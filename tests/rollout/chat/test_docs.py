"""docs/chat.md: its examples run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from protocols.fields import Environment, Record
from rollout.chat.aside import PLACES, QUICK_S, RENDER_S, THREADS
from rollout.chat.sizes import BITS, LONGEST
from rollout.client import RolloutClient
from rollout.environments.base import Environment as Base
from rollout.environments.registry import Registry
from rollout.service.service import Served
from rollout.tools.environment import ToolEnvironment
from rollout.tools.results import LIMIT
from rollout.tools.run import DEADLINE_S, MAX_CALLS
from rollout.tools.tool import Tool
from rollout.trajectory.segments import MAX_SEGMENTS
from rollout.trajectory.state import SAID_BYTES, SNAPSHOT_BYTES, TOKEN_BYTES
from tests.rollout.chat.test_wire import MODEL
from tests.rollout.chat.tiny import chat, tokenizer
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.tools.play import observed, play, run
from tests.rollout.workers import worker

TEXT = (Path(__file__).parents[3] / "docs" / "chat.md").read_text()


def example(containing: str) -> dict[str, Any]:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if containing in block)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(code, namespace)
    return namespace


@pytest.fixture
def weather_tools() -> Any:
    """The module of the page, where the worker finds it."""
    module = ModuleType("weather_tools")
    module.__dict__.update(example("weather_tools.py"), __name__="weather_tools")
    for found in vars(module).values():
        if callable(found):
            found.__module__ = "weather_tools"
    sys.modules["weather_tools"] = module
    yield module
    del sys.modules["weather_tools"]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.usefixtures("weather_tools")
def test_the_episode_of_the_page() -> None:
    made: Any = Registry.load(tools=["weather_tools"]).resolve(Environment(name="tools")).factory  # type: ignore[union-attr]
    assert [tool.name for tool in made.tools] == ["temperature", "fahrenheit"]
    assert made.tools[0].parameters["properties"]["city"]["description"] == "name of the city, such as Paris"
    turns = (call("temperature", '{"city": "Rome"}'), "24", call("fahrenheit", '{"celsius": 24}'), "75.2 F")
    how = {"config": {"user": ["And in Fahrenheit?"]}, "metadata": {"answer": "75.2"}}
    record: Record = run(play(made, *turns, **how))
    assert (record.status, record.reward) == ("completed", 1.0)
    assert [turn.finish_reason for turn in record.segments[0].turns] == ["tool_calls", "stop", "tool_calls", "stop"]
    assert '{"celsius": 24}' in observed(record)[0]
    assert "And in Fahrenheit?" in observed(record)[1]
    assert "75.2" in observed(record)[2]


@pytest.mark.usefixtures("weather_tools")
def test_the_submit_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(MODEL, 0, "stub:start", Registry.load(tools=["weather_tools"]), tokenizer(), chat())
    with worker(TimedEngine(), what=served) as thread, RolloutClient(thread.address) as client:
        example("def weather(client")["weather"](client)
    assert capsys.readouterr().out == "0.0 ['length']\n" * 2


def test_tools_with_a_memory() -> None:
    notebook: type[ToolEnvironment] = example("class Notebook")["Notebook"]
    schemas = tuple(Tool.of(function).schema for function in notebook().tools if callable(function))
    write = call("write", '{"note": "a"}')
    record = run(play(notebook, write + write, call("count", "{}"), "there are 2", tools=schemas))
    assert record.reward == 1.0, record.error
    assert "<tool_response>\n2\n</tool_response>" in observed(record)[1]


def test_a_tool_with_a_schema_of_its_own() -> None:
    asking: type[ToolEnvironment] = example("class Asking")["Asking"]
    record = run(play(asking, call("ask", '{"city": "Rome", "day": 1}') + call("ask", '{"day": 1}'), "ok"))
    assert '\n["city", "day"]\n' in observed(record)[0]
    assert "bad arguments: city: Field required" in observed(record)[0]


def test_a_plug_in_that_goes_on_in_messages() -> None:
    polite: Callable[[], Base] = example("class Polite")["Polite"]
    record = run(play(polite, "give it to me", "Thank you"))  # type: ignore[arg-type]
    assert [turn.reward for turn in record.segments[0].turns] == [None, 1.0]
    assert "What do we say?" in observed(record)[0]


def test_the_numbers_of_the_page() -> None:
    assert f"at most {MAX_CALLS} of them" in TEXT
    assert f"bad\ncalls in a row ({ToolEnvironment.max_bad_calls})" in TEXT
    assert f"deadline ({DEADLINE_S:g} s from its start)" in TEXT
    assert TEXT.count(f"within {RENDER_S:g} s") == 2
    assert f"{(SNAPSHOT_BYTES + SAID_BYTES) // 2**10} KiB and {TOKEN_BYTES} bytes for each token" in TEXT
    assert f"longer than {LIMIT:,} characters" in TEXT
    assert f"for {MAX_SEGMENTS} segments" in TEXT
    assert f"takes longer than {QUICK_S:g} s gives its place" in TEXT
    assert PLACES == 2
    assert "two at a\ntime" in TEXT
    assert f"up to {THREADS} in all" in TEXT
    assert f"longer than {LONGEST:,} characters" in TEXT
    assert f"powers end at {BITS:,} bits" in TEXT
