"""What watching costs: the arithmetic, the order of pairs, and the worker that nobody watches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import metrics
from bench.metrics import GROUP, cost, pairs, speed, verdict, worker


def test_the_cost_is_the_median_over_pairs_with_an_interval_around_it() -> None:
    lost, low, high = cost([[(99.0, 100.0), (98.0, 100.0), (100.0, 100.0), (97.0, 100.0), (110.0, 100.0)]])
    assert lost == pytest.approx(0.01)
    assert -0.1 - 1e-9 <= low <= lost <= high <= 0.03 + 1e-9


def test_what_differs_from_start_to_start_is_not_taken_for_certain() -> None:
    """A hundred pairs of two workers say nothing of the next two."""
    apart = [[(99.9, 100.0)] * 50, [(97.0, 100.0)] * 50]
    assert cost(apart)[2] == pytest.approx(0.03)
    assert cost(apart)[1] == pytest.approx(0.001)


def test_only_an_interval_that_lies_below_the_limit_shows_it() -> None:
    assert verdict(0.002, 0.009).startswith("metrics and logs cost less than 1%")
    assert verdict(0.002, 0.011).startswith("not shown")
    assert verdict(0.012, 0.02).startswith("metrics and logs cost more")


def test_pairs_take_turns_in_being_first_and_the_first_pair_only_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(metrics, "speed", lambda client, *_: asked.append(client) or len(asked))
    on, off = object(), object()
    assert list(pairs(on, off, 2, 8)) == [(3, 4), (6, 5)]  # type: ignore[arg-type]
    assert asked == [off, on, on, off, off, on]


def test_the_worker_that_nobody_watches_works_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    with worker("bench.unwatched", tiny, tmp_path / "off", "--metrics-file", str(tmp_path / "m.jsonl")) as running:
        found = speed(running, GROUP, 1)
        assert found.wall > 0
        assert found.cpu > 0
    assert not (tmp_path / "m.jsonl").exists()
    assert "INFO" not in (tmp_path / "off" / "log").read_text()
