"""Environments by name, and the built-in script."""

from __future__ import annotations

import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from protocols import fields
from protocols.errors import BadRequest
from rollout.environments.answer import Answer
from rollout.environments.base import TurnResult
from rollout.environments.registry import ENTRY_POINTS, Registry
from rollout.environments.remote import Remote
from rollout.environments.scripted import Scripted
from rollout.tools.environment import ToolEnvironment
from tests.rollout.build import run, script
from tests.rollout.environments.build import TURN, Fake, context, guarded
from tests.rollout.tools.sample_tools import lookup


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    registry = Registry({"guess": Fake})
    assert registry.names == ("guess", "remote", "scripted")
    with pytest.raises(BadRequest, match=r"'gues'.*guess, remote, scripted") as caught:
        registry.resolve(fields.Environment(name="gues"))
    assert caught.value.field == "environment.name"


def test_names_of_the_command_line_are_imported_at_start() -> None:
    registry = Registry.load(["mine=rollout.environments.remote:Remote"])
    assert registry.resolve(fields.Environment(name="mine")) is Remote


@pytest.mark.parametrize(
    "specs",
    [
        ["mine"],
        ["mine=module"],
        ["=a:b"],
        ["mine=no.such.module:X"],
        ["mine=rollout.environments.remote:Nothing"],
        ["mine=rollout.environments.registry:ENTRY_POINTS"],
        ["scripted=rollout.environments.remote:Remote"],
        ["a=rollout.environments.remote:Remote", "a=rollout.environments.remote:Remote"],
    ],
)
def test_a_bad_name_on_the_command_line_says_which(specs: list[str]) -> None:
    with pytest.raises(ValueError, match=specs[0].partition("=")[0] or "=a:b"):
        Registry.load(specs)


def test_where_a_module_is_looked_for_is_said() -> None:
    with pytest.raises(ValueError, match=r"No module named 'nowhere'; it must be installed, in the working directory"):
        Registry.load(["a=nowhere:Thing"])
    with pytest.raises(ValueError, match=r"^--env a=json:Thing: module 'json' has no attribute 'Thing'$"):
        Registry.load(["a=json:Thing"])
    for written, meant in (("some/nowhere.py", r"some\.nowhere"), ("/some/nowhere.py", "nowhere")):
        with pytest.raises(ValueError, match=rf"a module is named without \.py, {meant}, and must be in the working"):
            Registry.load([f"a={written}:Thing"])
        with pytest.raises(
            ValueError, match=rf"^--tools {written}: .* without \.py, {meant}, and must be in the working"
        ):
            Registry.load(tools=[written])


def test_a_class_that_can_be_no_environment_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"JSONDecoder is no subclass of rollout\.environments\.base\.Environment$"):
        Registry.load(["a=json:JSONDecoder"])
    with pytest.raises(ValueError, match=r"Environment does not define step$"):
        Registry.load(["a=rollout.environments.base:Environment"])


@pytest.mark.parametrize(
    ("says", "complaint"),
    [
        ({"isolation": "proces"}, "'a': isolation is 'proces', neither 'worker' nor 'process'"),
        ({"isolation": True}, "isolation is True"),
        ({"on_length": "continu"}, "'a': on_length is 'continu', neither 'end' nor 'continue'"),
        ({"__init__": lambda _self, _config: None}, "'a': it is made without arguments, .* missing .* '_config'"),
        ({"chat_roles": "user"}, "'a': chat_roles is 'user', not a tuple of roles"),
        ({"chat_roles": (1,)}, r"chat_roles is \(1,\)"),
        ({"chat_roles": 1}, r"chat_roles is 1, not"),
        ({"chat_roles": ["user "]}, r"chat_roles is \['user '\], not"),
        ({"immediate": True}, "'a': step is asynchronous, and immediate says that it does not wait"),
    ],
)
def test_what_a_class_says_is_checked_at_start(says: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Registry({"a": type("Odd", (Fake,), says)})


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        (len, "'a': tools is '<built-in function len>', not a tuple of functions"),
        ("add", "'a': tools is 'add', not a tuple"),
        (None, "'a': tools is 'None', not a tuple"),
        ((5,), "'a': '5' is no function"),
        (({"type": "function"},), "is no function"),
        ((print,), "'a': print: 'args' must be a parameter that can be given by its name"),
        ((lookup, lookup), "'a': two of its tools are called 'lookup'"),
    ],
)
def test_what_are_no_tools_is_told_at_start(tools: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Registry({"a": type("Odd", (ToolEnvironment,), {"tools": tools})})


def test_tools_that_only_an_instance_knows_are_no_fault() -> None:
    assert "a" in Registry({"a": type("Own", (ToolEnvironment,), {"tools": property(lambda _: (lookup,))})}).names


@pytest.mark.parametrize("code", ["import sys; sys.exit(3)", "raise SystemExit", "{}['x']"])
def test_a_module_that_ends_whoever_imports_it_ends_nobody(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    said = "KeyError: 'x'" if "'x'" in code else "SystemExit: "
    with pytest.raises(ValueError, match=f"^--env a=leaving:Thing: {said}"):
        Registry.load(["a=leaving:Thing"])
    with pytest.raises(ValueError, match=f"^--tools leaving: {said}"):
        Registry.load(tools=["leaving"])
    registry = Registry({}, (EntryPoint("late", "leaving:Thing", ENTRY_POINTS),))
    with pytest.raises(BadRequest, match=f"'late' cannot be imported: {said}"):
        registry.resolve(fields.Environment(name="late"))


def test_an_entry_point_is_imported_when_it_is_asked_for() -> None:
    good = EntryPoint("good", "rollout.environments.remote:Remote", ENTRY_POINTS)
    broken = EntryPoint("broken", "no.such.module:Class", ENTRY_POINTS)
    registry = Registry({}, (good, broken))
    assert not registry.at_hand(fields.Environment(name="good")), "an import takes its time"
    assert registry.names == ("broken", "good", "remote", "scripted")
    assert registry.resolve(fields.Environment(name="good")) is Remote
    assert registry.resolve(fields.Environment(name="good")) is Remote
    assert registry.at_hand(fields.Environment(name="good"))
    with pytest.raises(BadRequest, match=r"'broken' cannot be imported.*no"):
        registry.resolve(fields.Environment(name="broken"))


def test_the_command_line_goes_before_an_entry_point() -> None:
    registry = Registry({"x": Fake}, (EntryPoint("x", "rollout.environments.remote:Remote", ENTRY_POINTS),))
    assert registry.resolve(fields.Environment(name="x")) is Fake


def test_a_script_is_played_and_then_done() -> None:
    async def main() -> None:
        registry = Registry({})
        before = set(threading.enumerate())
        guard = guarded(registry.resolve(script((30,), (31, 32))))
        assert await guard.open(context, ()) == Answer()
        assert guard.fixed_turns
        assert not guard.ends_when_cut
        answers = []
        for index in range(3):
            turn = TurnResult(TURN.turn.model_copy(update={"index": index}), TURN.token_ids, TURN.logprobs, 5)
            answer = await guard.step(turn, ())
            assert isinstance(answer, Answer)
            answers.append(answer)
        assert [None if a.observation is None else a.observation.tolist() for a in answers] == [[30], [31, 32], None]
        assert [a.done for a in answers] == [False, False, True]
        assert set(threading.enumerate()) <= before, "a built-in environment needs no thread"

    run(main())
    assert Scripted(()).fixed_turns


def test_an_environment_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        context().encode("text")
