"""One rule for what a tool returns: always visible, always text, never too much."""

from __future__ import annotations

import datetime
import enum
import itertools
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rollout.tools.results import LIMIT, as_text


@dataclass
class Point:
    x: int
    label: str


class Model(BaseModel):
    day: datetime.date


class Colour(enum.Enum):
    RED = "red"


class Plain:
    """No repr."""


class Spoken:
    def __repr__(self) -> str:
        return "Spoken()"


class Table:
    """As data frames are."""

    def __repr__(self) -> str:
        return "a  b\n1  2"


class Silent:
    def __str__(self) -> str:
        return ""


class Listed:
    """As tensors of several libraries are."""

    def tolist(self) -> list[int]:
        return [1, 2]


class Broken:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        ("", '""'),
        (None, "null"),
        (True, "true"),
        ({"celsius": 9}, '{"celsius": 9}'),
        ([1, 2], "[1, 2]"),
        (3.5, "3.5"),
        (float("nan"), "NaN"),
        ("é", "é"),
        (["é"], '["é"]'),
        (b"caf\xc3\xa9\xff", "café\ufffd"),
        (b"", '""'),
        ({1: {2}}, '{"1": [2]}'),
        (Point(1, "a"), '{"x": 1, "label": "a"}'),
        (Model(day=datetime.date(2020, 1, 2)), '{"day": "2020-01-02"}'),
        (Colour.RED, "red"),
        (Decimal("1.50"), "1.50"),
        (np.float32(2.5), "2.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a": np.int64(7)}, '{"a": 7}'),
        (Plain(), "<Plain>"),
        ([Plain()], '["<Plain>"]'),
        (Spoken(), "Spoken()"),
        ([Spoken()], '["Spoken()"]'),
        (Table(), "a  b\n1  2"),
        (Silent(), '""'),
        (Broken(), "<Broken>"),
        ("\ud800", "?"),
        (float("inf"), "Infinity"),
        (memoryview(b"abc"), "abc"),
        (Listed(), "[1, 2]"),
        ([Listed()], "[[1, 2]]"),
        ((i for i in range(3)), "[0, 1, 2]"),
    ],
)
def test_the_rule(value: Any, text: str) -> None:
    assert as_text(value) == text


class Leaving:
    """Ends whoever looks at it."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit(name)

    def __repr__(self) -> str:
        raise KeyboardInterrupt


class LeavingText(str):
    def __str__(self) -> str:
        raise SystemExit

    __len__ = __getitem__ = __str__  # type: ignore[assignment]


class LeavingMap(dict[str, int]):
    def items(self) -> Any:
        raise SystemExit


def test_what_ends_whoever_looks_at_it_does_not() -> None:
    """A coroutine tool's result is looked at on the worker's loop, which a SystemExit would end."""
    assert as_text(Leaving()) == "<Leaving>"
    assert as_text(10**5000) == "<int>"
    assert as_text([Leaving()]) == "<list>"
    assert as_text(LeavingText("abc")) == "abc"
    assert as_text([LeavingText("abc")]) in ('["abc"]', "<list>")
    assert "1" in as_text(LeavingMap(a=1))


def test_of_what_has_no_end_the_beginning_is_taken() -> None:
    text = as_text(itertools.count(), 100)
    assert text.startswith("[0, 1, 2")
    assert "[cut: the first 100 of " in text


def test_what_json_cannot_hold_is_still_shown() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert as_text(cycle) == "[[...]]"
    assert "\\xff" in as_text({"raw": b"\xff"})


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 2_000_000])
def test_too_much_is_cut_with_a_mark(length: int) -> None:
    text = as_text("x" * length)
    assert text.startswith("x" * LIMIT)
    assert text[LIMIT:] == ("" if length == LIMIT else f"\n[cut: the first {LIMIT} of {length} characters]")


@settings(deadline=None)
@given(st.recursive(st.none() | st.text() | st.binary() | st.floats() | st.integers(), st.lists, max_leaves=5))
def test_any_value_is_text(value: Any) -> None:
    text = as_text(value, 100)
    assert 0 < len(text) < 200
    text.encode()
