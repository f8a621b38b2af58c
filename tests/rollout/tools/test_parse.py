"""Calls as models write them, well and badly."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools.parse import MOST, BadCall, Call, read


def block(name: str = "lookup", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = Call("lookup", {"key": 4})
DRAFT = block(key=4)


def problem(text: str, **how: bool) -> str:
    (call,) = read(text, **how).calls
    assert isinstance(call, BadCall)
    return call.problem


def test_a_call_with_text_around_it() -> None:
    said = read(f"I look.\n{DRAFT}\nDone.")
    assert said.calls == (CALL,)
    assert said.content == "I look.\n\nDone."


def test_several_calls_keep_their_order() -> None:
    said = read("first " + "and ".join(block(name) for name in "abc"))
    assert [call.name for call in said.calls if isinstance(call, Call)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "a </tool_call> b"},
        {"text": "<tool_call>{}</tool_call>"},
        {"text": "</think>"},
        {"text": "<think>"},
        {"deep": {"list": [{"a": [1, {"b": None}]}], "quote": 'say "hi"', "slash": "\\", "nul": "\x00"}},
        {"text": "Orl\u00e9ans \U0001f389"},
        {},
    ],
)
def test_nested_and_escaped_arguments_come_out_as_they_went_in(arguments: dict[str, object]) -> None:
    assert read(block(**arguments) + DRAFT).calls == (Call("lookup", arguments), CALL)


def test_line_breaks_inside_of_a_string_are_taken() -> None:
    said = read('<tool_call>{"name": "f", "arguments": {"code": "a\nb\t"}}</tool_call>')
    assert said.calls == (Call("f", {"code": "a\nb\t"}),)


def test_arguments_that_are_encoded_twice() -> None:
    said = read('<tool_call>{"name": "lookup", "arguments": "{\\"key\\": 4}"}</tool_call>')
    assert said.calls == (CALL,)


@pytest.mark.parametrize("between", ["", "\n", ", ", ";\n"])
def test_calls_that_share_one_pair_of_tags(between: str) -> None:
    """`Extra data` to a reader of one JSON value."""
    one = json.dumps({"name": "lookup", "arguments": {"key": 4}})
    assert read(f"<tool_call>{one}{between}{one}</tool_call>").calls == (CALL, CALL)
    assert read(f"<tool_call>[{one}, {one}]</tool_call>").calls == (CALL, CALL)


# Reasoning.


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"<think>\nMaybe {DRAFT}\n</think>\n\n{DRAFT}", 1),
        (f"<think>{DRAFT}</think>no call then", 0),
        (f"<think>{DRAFT} {DRAFT}", 0),
        (f"<think>{DRAFT}</think></think>{DRAFT}", 1),
        (f"<think>a</think>{DRAFT}</think>{DRAFT}", 1),
        (f"<think>a <think> {DRAFT}</think> b {DRAFT} </think>{DRAFT}", 1),
        (f"thought without a beginning {DRAFT}</think>{DRAFT}", 1),
        (f"for example: {DRAFT}", 1),
        (f"{DRAFT}<think>afterthought {DRAFT}", 1),
    ],
)
def test_calls_in_reasoning_are_not_calls(text: str, count: int) -> None:
    assert read(text).calls == (CALL,) * count


def test_a_turn_that_begins_inside_of_its_reasoning() -> None:
    assert read(f"hm {DRAFT}", thinking=True).calls == ()
    said = read(f"hm {DRAFT}</think>ok {DRAFT}", thinking=True)
    assert (said.calls, said.content, said.reasoning) == ((CALL,), "ok", f"hm {DRAFT}")


def test_reasoning_and_content_are_told_apart() -> None:
    said = read("<think>\nwhy\n</think>\n\nbecause")
    assert (said.reasoning, said.content) == ("why", "because")


def test_a_name_is_text_whatever_json_can_spell() -> None:
    (call,) = read('<tool_call>{"name": "look\\ud800up", "arguments": {}}</tool_call>').calls
    assert call == Call("look?up", {})


# What is no call.


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"name": "lookup", "arguments": {"key": 4}', "not valid JSON"),
        ('{"name": "lookup", "arguments": {"key": NaN}}', "NaN"),
        ('{"name": "lookup", "arguments": {"key": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("lookup(key=4)", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "lookup"} trailing', "text follows"),
        ('{"arguments": {}}', 'no "name"; write {"name": ..., "arguments": {...}} instead of: {"arguments"'),
        ('{"type": "function", "function": {"name": "lookup", "arguments": {}}}', 'no "name"'),
        ('{"name": "lookup", "parameters": {"key": 4}}', 'no "arguments" but "parameters"; write {"name": ...'),
        ('{"name": "lookup", "key": 4}', 'no "arguments" but "key"; write {"name": ...'),
        ('{"name": "lookup", "arguments": {"text": "<tool_call>{}</tool_call>"}', "not valid JSON"),
        ('{"name": "lookup", "arguments": {"text": "<tool_call>"}} trailing', "text follows"),
        ('{"name": "lookup", "arguments": {"text": "<tool_call>", "key": NaN}}', "NaN"),
        ('{"name": "lookup", "arguments": {"text": "<tool_call>}}', "not valid JSON"),
        ('{"name": "lookup", "arguments": {"text": "four}}', "not valid JSON"),
        ('{"name": 5, "arguments": {}}', 'no "name"'),
        ('{"name": "lookup", "arguments": [4]}', '"arguments"'),
        ('{"name": "lookup", "arguments": "four"}', '"arguments"'),
        ('"lookup"', "JSON object"),
    ],
)
def test_a_malformed_call_is_one_error_that_names_the_problem(body: str, named: str) -> None:
    calls = read(f"a <tool_call>{body}</tool_call> b {DRAFT}").calls
    bad = [call for call in calls if isinstance(call, BadCall)]
    assert len(bad) == 1
    assert named in bad[0].problem
    assert len(bad[0].problem) < 500
    assert calls[-1] == CALL


def test_a_call_without_its_closing_tag() -> None:
    """At the end of a turn that the model ended it is one; of a cut turn nobody knows what would have followed."""
    text = DRAFT.removesuffix("\n</tool_call>")
    assert read(text).calls == (CALL,)
    assert "cut" in problem(text, complete=False)
    assert read(f"{text}\n{DRAFT}").calls == (CALL, CALL)


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(DRAFT)))
def test_a_call_that_was_cut_is_never_one(length: int) -> None:
    said = read(f"{DRAFT} {DRAFT[:length]}", complete=False)
    assert said.calls[0] == CALL
    (cut,) = said.calls[1:]
    assert problem_of(cut).startswith("the turn was cut inside of a call, which was not run")


QUOTING = '<tool_call>{"name": "f", "arguments": {"text": "a </tool_call> b <tool_call>{} \\u00e9", "yes": true}}'


@pytest.mark.parametrize("length", range(QUOTING.index("a <"), len(QUOTING)))
def test_a_tag_in_a_string_ends_no_call_that_was_cut(length: int) -> None:
    assert "cut inside" in problem(QUOTING[:length], complete=False)
    assert read(QUOTING[:length], complete=False).content == ""


def test_a_call_without_arguments_may_leave_them_out_and_say_more_beside_them() -> None:
    assert read('<tool_call>{"name": "now"}</tool_call>').calls == (Call("now", {}),)
    said = read('<tool_call>{"id": 7, "type": "function", "name": "lookup", "arguments": {"key": 4}}</tool_call>')
    assert said.calls == (CALL,)


@settings(deadline=None)
@given(st.text(alphabet='<>/{}[]":, \\abtool_callthink\n', max_size=200) | st.text(max_size=50))
def test_nothing_that_a_model_says_raises(text: str) -> None:
    for complete in (True, False):
        for thinking in (True, False):
            read(f"<tool_call>{text}</tool_call>{text}", complete=complete, thinking=thinking)
            read(text, complete=complete, thinking=thinking)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=9), st.lists), max_size=3))
def test_whatever_can_be_said_in_json_can_be_an_argument(arguments: dict[str, object]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=False)
    assert read(f"x<tool_call>{body}</tool_call>").calls == (Call("f", arguments),)


@pytest.mark.parametrize(
    "again",
    [
        "<tool_call>",
        "<tool_call>{",
        "<tool_call></think>",
        "<tool_call>{</think>",
        '<tool_call>{"name": "f"}',
        "<tool_call>\n</tool_call>\n",
    ],
)
def test_a_turn_that_repeats_a_tag_to_its_limit_is_read_in_no_time(again: str) -> None:
    began = time.process_time()
    said = read(again * 40_000)
    assert time.process_time() - began < 2
    if "</think>" not in again:
        assert len(said.calls) == MOST + 1
        assert problem_of(said.calls[-1]).startswith(f"no more than {MOST} calls")


@pytest.mark.parametrize("body", [f"[{', '.join(['7'] * 200_000)}]", '{"name": "f"} ' * 200_000])
def test_many_calls_in_one_pair_of_tags_are_no_way_around_that(body: str) -> None:
    began = time.process_time()
    said = read(f"<tool_call>{body}</tool_call>after")
    assert time.process_time() - began < 2
    assert (len(said.calls), said.content) == (MOST + 1, "after")


def problem_of(call: Call | BadCall) -> str:
    assert isinstance(call, BadCall)
    return call.problem
