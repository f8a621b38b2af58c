"""One rule for what a tool returns: always visible, always text, never too much."""

from __future__ import annotations

import datetime
import enum
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
        (Colour.RED, '"red"'),
        (Decimal("1.50"), '"1.50"'),
        (np.float32(2.5), "2.5"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a": np.int64(7)}, '{"a": 7}'),
        (Plain(), '"<Plain>"'),
        ([Plain()], '["<Plain>"]'),
        (Spoken(), '"Spoken()"'),
        (Broken(), '"<Broken>"'),
        ("\ud800", "?"),
    ],
)
def test_the_rule(value: Any, text: str) -> None:
    assert as_text(value) == text


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


@given(st.recursive(st.none() | st.text() | st.binary() | st.floats() | st.integers(), st.lists, max_leaves=5))
def test_any_value_is_text(value: Any) -> None:
    text = as_text(value, 100)
    assert 0 < len(text) < 200
    text.encode()
