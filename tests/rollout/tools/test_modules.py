"""Which functions of a module are tools."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from protocols.errors import BadRequest
from protocols.fields import Environment
from rollout.environments.pool import Owner
from rollout.environments.registry import Registry
from rollout.tools.environment import Placed
from rollout.tools.modules import environment_of


def module(name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    sys.modules[name] = made
    exec(source, made.__dict__)
    return made


@pytest.fixture(autouse=True)
def no_modules_stay() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("made_"):
            del sys.modules[name]


def names(*modules: str) -> list[str]:
    return [tool.name for tool in environment_of(modules).tools]  # type: ignore[union-attr]


def test_public_functions_that_are_written_there() -> None:
    module("made_a", "from os.path import join\nimport json\ndef f(): ...\ndef _g(): ...\nclass C: ...\nx = f\n")
    assert names("made_a") == ["f"]


def test_or_those_that_it_lists() -> None:
    module("made_a", "from textwrap import dedent\n__all__ = ['dedent', 'f', 'X']\nX = 1\ndef f(): ...\ndef g(): ...\n")
    assert names("made_a") == ["dedent", "f"]


def test_a_function_in_a_wrapper_is_one() -> None:
    source = (
        "import functools\nfrom typing import NewType\nId = NewType('Id', int)\n@functools.cache\ndef f(a: int): ...\n"
    )
    module("made_a", source)
    assert names("made_a") == ["f"]
    module("made_b", source + "__all__ = ['Id', 'f']\n")
    assert names("made_b") == ["f"]


def test_several_modules_are_one_environment() -> None:
    module("made_a", "def f(): ...\n")
    module("made_b", "async def g(): ...\ndef reward(episode): return len(episode.answer)\n")
    made = environment_of(["made_a", "made_b"])
    assert [tool.name for tool in made.tools] == ["f", "g"]  # type: ignore[union-attr]
    episode: Any = SimpleNamespace(answer="four")
    assert made().reward(episode) == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1\n", "no public function"),
        ("__all__ = ['f', 'g']\ndef f(): ...\n", "its __all__ names 'g', which it does not have"),
        ("def f(*a): ...\n", "'a'"),
        ("def same(): ...\n", "'same' is in an earlier module too"),
    ],
)
def test_what_is_wrong_is_named_with_its_module(source: str, said: str) -> None:
    module("made_a", "def same(): ...\n")
    module("made_b", source)
    with pytest.raises(ValueError, match="--tools made_b: ") as refused:
        environment_of(["made_a", "made_b"])
    assert said in str(refused.value)


def test_a_module_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"--tools made_nowhere: .*PYTHONPATH"):
        environment_of(["made_nowhere"])


def test_the_registry_offers_them_under_one_name() -> None:
    module("made_a", "def f(): ...\n")
    registry = Registry.load(tools=["made_a"])
    assert "tools" in registry.names
    made = registry.resolve(Environment(name="tools"))
    assert isinstance(made, Placed)
    assert made.factory.tool_schemas({})[0]["function"]["name"] == "f"
    assert made().owner == Owner(), "nobody's"
    theirs = registry.resolve(Environment(name="tools"), Owner("session", "trajectory"))
    assert isinstance(theirs, Placed)
    assert (theirs().owner, theirs().pool) == (Owner("session", "trajectory"), made().pool)
    assert "tools" not in Registry({}).names
    with pytest.raises(BadRequest, match="--tools"):
        Registry({}).resolve(Environment(name="tools"))
    with pytest.raises(ValueError, match="built in"):
        Registry({"tools": made})
