"""BFCL's multi-turn tasks behind a trajectory: reference calls are right, and anything less is not."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from typing import Any

import pytest

from protocols.fields import Template
from rollout.chat.conversation import Conversation
from tests.rollout.chat.tiny import THINKING, chat
from tests.rollout.environments.adapters.play import play, text
from tests.rollout.environments.build import context

pytest.importorskip("bfcl_eval")

from rollout.environments.adapters.bfcl import CALLS_PER_TURN, CATEGORIES, Bfcl, Play, load, messages, methods, tools
from rollout.tools.parse import BadCall, Call

FIRST = {"category": "multi_turn_base", "index": 1}


def as_call(text: str, known: Any) -> Call:
    """A reference call, written as Python, in the form that a model uses."""
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    names = list(inspect.signature(known[node.func.id]).parameters)
    given = dict(zip(names, (ast.literal_eval(arg) for arg in node.args), strict=False))
    return Call(node.func.id, given | {str(k.arg): ast.literal_eval(k.value) for k in node.keywords})


def solve(config: dict[str, Any]) -> Play:
    task = load(config)
    game = Play(task)
    for turn in task["ground_truth"]:
        if turn:  # at once: some take more calls than a user's turn may take sampled ones
            game.call(tuple(as_call(said, game._methods) for said in turn))
        game.next_user()
    return game


def written(task: dict[str, Any]) -> list[str]:
    """Turns of a model that makes all reference calls: one call each, then a word to the user."""
    known = methods(Play(task)._apis)
    turns = []
    for calls in task["ground_truth"]:
        for call in (as_call(reference, known) for reference in calls):
            said = json.dumps({"name": call.name, "arguments": call.arguments})
            turns.append(f"<tool_call>\n{said}\n</tool_call>")
        turns.append("Done.")
    return turns


@pytest.mark.parametrize("category", CATEGORIES)
def test_all_reference_calls_are_right(category: str) -> None:
    for index in range(200):
        game = solve({"category": category, "index": index})
        assert game.right == game.turns, (category, index)


def test_a_trajectory_of_reference_calls_has_reward_1_and_the_tools_in_its_prompt() -> None:
    record = play(Bfcl, FIRST, messages(FIRST), written(load(FIRST)), template=THINKING)
    assert (record.status, record.finish_reason, record.error) == ("completed", "env_done", None)
    assert (record.reward, record.rewards) == (1.0, {"turns": 1.0})
    story = text(record)
    task = load(FIRST)
    assert all(turn[0]["content"] in story for turn in task["question"])
    assert '"name": "grep"' in story
    assert '"name": "cp"' not in story, "this task goes without it"
    assert "current_directory_content" in story
    reasons = [turn.finish_reason for turn in record.segments[0].turns]
    assert reasons.count("tool_calls") == sum(map(len, task["ground_truth"]))


def test_it_runs_in_a_process() -> None:
    record = play(Bfcl, FIRST, messages(FIRST), written(load(FIRST)), template=THINKING, isolated=True)
    assert (record.reward, record.error) == (1.0, None)


def test_a_missing_call_or_another_state_ends_it_with_a_share() -> None:
    turns = written(load(FIRST))
    for wrong, share in ((["Done."], 0.0), ([turns[0], "Done.", "Done."], 0.25)):
        record = play(Bfcl, FIRST, messages(FIRST), wrong, template=THINKING)
        assert (record.finish_reason, record.reward, record.rewards) == ("env_done", 0.0, {"turns": share})
    extra = f"<tool_call>{json.dumps({'name': 'touch', 'arguments': {'file_name': 'x'}})}</tool_call>"
    record = play(Bfcl, FIRST, messages(FIRST), [turns[0], extra, "Done."], template=THINKING)
    assert record.rewards == {"turns": 0.0}


def test_what_cannot_be_called_says_so_and_can_be_repaired() -> None:
    turns = written(load(FIRST))
    bad = [
        '<tool_call>{"name": "cp", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "_load_scenario", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ls", "arguments": {"no": 1}}</tool_call>',
        '<tool_call>{"name": "ls", </tool_call>',
    ]
    record = play(Bfcl, FIRST, messages(FIRST), [*bad, *turns], template=THINKING)
    assert record.reward == 1.0
    assert text(record).count("Error during execution") == 4


def test_calls_without_end_are_ended() -> None:
    record = play(Bfcl, FIRST, messages(FIRST), lambda _: written(load(FIRST))[0], template=THINKING)
    assert (record.finish_reason, record.reward) == ("env_done", 0.0)
    assert len(record.segments[0].turns) == CALLS_PER_TURN + 1


def test_schemas_are_json_schemas() -> None:
    found = tools({"category": "multi_turn_base", "index": 7})
    assert 10 < len(found) < 60
    kinds: set[str] = set()

    def look(node: Any) -> None:
        if isinstance(node, dict):
            kinds.update([node["type"]] if isinstance(node.get("type"), str) else [])
            for value in node.values():
                look(value)

    look([tool["function"]["parameters"] for tool in found])
    for tool in found:
        look(tool["function"]["parameters"])
    assert kinds <= {"object", "string", "integer", "number", "boolean", "array"}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"category": "multi_turn_miss_func"}, "config.category must be one of"),
        ({"index": 200}, "config.index must be below 200"),
        ({"task": 1}, "config.task is unknown"),
    ],
)
def test_a_config_that_means_nothing_is_refused_by_name(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        messages(config)


def test_a_task_goes_on_from_what_was_called() -> None:
    task = load(FIRST)
    first = Bfcl()
    first._play, first._done = Play(task), []
    for turn in task["ground_truth"][:2]:
        first._call(tuple(as_call(said, first._play._methods) for said in turn))
        first._next_user()
    first._call((BadCall("no JSON"),))
    form = chat(THINKING).form(tools(FIRST), {})
    talk = Conversation(form, messages(FIRST), Template())
    second = Bfcl()
    second.restore(dataclasses.replace(context(), chat=talk, config=FIRST), json.loads(json.dumps(first.snapshot())))
    for each in (first, second):
        for turn in task["ground_truth"][2:]:
            each._call(tuple(as_call(said, each._play._methods) for said in turn))
            each._next_user()
        assert each._play.right == 4
