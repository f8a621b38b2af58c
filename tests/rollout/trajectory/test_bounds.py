"""How long it may become: at the limit it fits, one above it does not, and the end names the limit that was met."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.fields import STATUS_OF, Budget, Truncation, Turn
from rollout.environments.answer import End
from rollout.trajectory.bounds import Bounds


def bounds(max_context: int = 64, **budget: Any) -> Bounds:
    return Bounds(Budget(**budget), max_context)


@pytest.mark.parametrize(
    ("total", "tokens", "limit", "value"),
    [
        (None, 64, "max_context", 64),
        (1, 1, "max_total_tokens", 1),
        (63, 63, "max_total_tokens", 63),
        (64, 64, "max_context", 64),
        (65, 64, "max_context", 64),
    ],
)
def test_the_smaller_limit_holds_and_is_named(total: int | None, tokens: int, limit: str, value: int) -> None:
    b = bounds(max_total_tokens=total)
    assert b.tokens == tokens
    reason = "max_total_tokens" if limit == "max_total_tokens" else "context_overflow"
    assert b.overflow() == End(reason, Truncation(limit=limit, value=value))  # type: ignore[arg-type]


def test_the_engines_own_overflow_is_that_of_the_context_whatever_the_budget() -> None:
    end = bounds(max_total_tokens=10).context_overflow()
    assert end == End("context_overflow", Truncation(limit="max_context", value=64))


@pytest.mark.parametrize(
    ("reason", "budget", "truncation"),
    [
        ("length", {}, ("max_tokens", 5)),
        ("length", {"turn_deadline_s": 2.0}, ("max_tokens", 5)),
        ("turn_deadline", {"turn_deadline_s": 2.0}, ("turn_deadline_s", 2.0)),
        ("turn_deadline", {}, ("turn_deadline_s", 0.0)),
    ],
)
def test_a_cut_turn_names_what_cut_it(reason: Any, budget: dict[str, Any], truncation: tuple[str, float]) -> None:
    turn = Turn(index=0, start=3, length=5, finish_reason=reason)
    limit, value = truncation
    end = bounds(**budget).cut(turn)
    assert end == End("length", Truncation(limit=limit, value=value))
    assert STATUS_OF[end.reason] == "truncated"
