"""From a function to what the model is told of it, and from the model's arguments to the function's."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from rollout.tools.tool import BadArguments, Tool, check


@dataclass
class Place:
    city: str
    zip: int = 0


def forecast(
    city: str,
    days: Annotated[int, Field(ge=1, le=7)] = 1,
    *,
    unit: Literal["C", "F"] = "C",
    schema: dict[str, int] | None = None,
    _hidden: bool = False,
    at: Place | None = None,
) -> list[Any]:
    """The weather to come.

    As a list.

    Args:
        city: where,
            in words
        days: how many
    Returns:
        nothing of interest here
    """
    return [city, days, unit, schema, _hidden, at]


def test_a_schema_of_hints_and_docstring() -> None:
    tool = Tool.of(forecast)
    assert tool.schema["type"] == "function"
    told = tool.schema["function"]
    assert (told["name"], told["description"]) == ("forecast", "The weather to come.\n\nAs a list.")
    parameters = told["parameters"]
    assert parameters["required"] == ["city"]
    assert list(parameters["properties"]) == ["city", "days", "unit", "schema", "_hidden", "at"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "where,\nin words"}
    assert parameters["properties"]["days"]["maximum"] == 7
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert "title" not in parameters
    assert parameters["$defs"]["Place"]["required"] == ["city"]


def test_a_function_without_hints_or_docstring() -> None:
    def bare(a, b=2):  # type: ignore[no-untyped-def]
        return a, b

    tool = Tool.of(bare)
    assert (tool.name, tool.description) == ("bare", "")
    assert tool.parameters["required"] == ["a"]
    assert check(bare, {"a": [1]}) == {"a": [1]}


def test_arguments_become_the_functions_own_types() -> None:
    given = check(forecast, {"city": "Rome", "days": 3, "at": {"city": "x", "zip": 5}, "_hidden": True})
    assert given == {"city": "Rome", "days": 3, "at": Place("x", 5), "_hidden": True}
    assert forecast(**given) == ["Rome", 3, "C", None, True, Place("x", 5)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "city: Field required"),
        ({"city": 5}, "city: Input should be a valid string"),
        ({"city": "x", "days": 8}, "days: Input should be less than or equal to 7"),
        ({"city": "x", "unit": "K"}, "unit: Input should be 'C' or 'F'"),
        ({"city": "x", "town": 1}, "town: there is no such argument; known: city, days, "),
        ({"city": "x", "parameter_1": 1}, "parameter_1: there is no such argument"),
        ({"city": "x", "at": {}}, "at.city: Field required"),
        ({"city": "x", "at": {"city": "x", "zip": 5, "street": 1}}, "at.street: Unexpected keyword argument"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(BadArguments) as refused:
        check(forecast, arguments)
    assert named in str(refused.value)


def test_a_refusal_is_short() -> None:
    with pytest.raises(BadArguments) as refused:
        check(forecast, {f"x{i}": "y" * 10_000 for i in range(1000)})
    assert str(refused.value).endswith("; and 998 more")
    assert len(str(refused.value)) < 300


def test_functions_that_cannot_be_called_by_name_are_refused() -> None:
    def many(*values: int) -> None: ...

    def only_placed(a: int, /) -> None: ...

    def open_ended(**rest: int) -> None: ...

    for function, name in ((many, "values"), (only_placed, "a"), (open_ended, "rest")):
        with pytest.raises(ValueError, match=name):
            Tool.of(function)


def test_an_async_generator_is_no_tool() -> None:
    """The model would read where it lies in memory."""

    async def several(count: int) -> AsyncIterator[int]:
        yield count

    with pytest.raises(ValueError, match="several: an async generator"):
        Tool.of(several)


def test_a_hint_that_does_not_exist_is_refused() -> None:
    def lost(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ValueError, match="Nowhere"):
        Tool.of(lost)


class Opaque:
    def __call__(self, a: int) -> int:
        return a


def test_what_json_cannot_hold_is_refused_by_the_name_of_the_function() -> None:
    def arrays(a: np.ndarray) -> None: ...

    def calls(a: Callable[[], int]) -> None: ...

    def mine(a: Opaque) -> None: ...

    for function, said in ((arrays, "ndarray"), (calls, "Callable"), (mine, "Opaque")):
        with pytest.raises(ValueError, match=f"^{function.__name__}: .*{said}"):
            Tool.of(function)


def scaled(value: float, factor: float, shift: float = 0.0) -> float:
    """Scale it.

    Args:
        value: what
        factor: by how much
    """
    return value * factor + shift


def test_objects_that_can_be_called_and_partials_are_functions_too() -> None:
    tool = Tool.of(Opaque())
    assert (tool.name, tool.parameters["properties"]) == ("Opaque", {"a": {"type": "integer"}})
    assert check(tool.function, {"a": "4"}) == {"a": 4}
    tool = Tool.of(functools.partial(scaled, factor=3.0))
    assert (tool.name, tool.description) == ("scaled", "Scale it.")
    value = {"description": "what", "type": "number"}
    assert tool.parameters["properties"] == {"value": value, "shift": {"default": 0.0, "type": "number"}}
    assert tool.function(**check(tool.function, {"value": 2})) == 6.0
    with pytest.raises(BadArguments, match="factor: there is no such argument; known: value, shift"):
        check(tool.function, {"value": 2, "factor": 5})
    placed = Tool.of(functools.partial(scaled, 2.0))
    assert list(placed.parameters["properties"]) == ["factor", "shift"]
    assert Tool("own", "", {}, functools.partial(scaled, factor=1.0)).function is not None


def test_a_docstring_may_begin_with_its_arguments() -> None:
    def terse(a: int) -> None:
        """Args:
        a: the only one
        """

    def indented(a: int) -> None:
        """
        Args:
            a: the only one
        """

    assert Tool.of(indented).parameters["properties"]["a"]["description"] == "the only one"
    assert Tool.of(indented).description == ""
    assert "a" in Tool.of(terse).parameters["properties"]
