"""docs/trajectories.md: its numbers are the code's."""

from __future__ import annotations

from pathlib import Path

from engine.scheduling.kv_holds import AWAY_SHARE, LONG_WAIT
from rollout.generation.kv_budget import WINDOW

TEXT = " ".join((Path(__file__).parents[3] / "docs" / "trajectories.md").read_text().split())


def test_the_numbers_of_the_page() -> None:
    assert f"for more than {LONG_WAIT:g} s hold beyond half of the pool" in TEXT
    assert AWAY_SHARE == 2
    assert f"the last {WINDOW} that ended" in TEXT
