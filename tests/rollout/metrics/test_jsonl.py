from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rollout.metrics.jsonl import JsonLines
from rollout.metrics.row import Row


def test_rows_are_lines_that_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    lines = JsonLines(path)
    lines.write(Row("round", 12.34567, {"rollout/step": 3, "rollout/tokens_per_s": 1.5}))
    assert json.loads(path.read_text()) == {
        "kind": "round",
        "time": 12.346,
        "rollout/step": 3,
        "rollout/tokens_per_s": 1.5,
    }
    lines.close()


def test_numbers_that_are_not_finite_are_null_and_raise_nothing(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.write(Row("gauges", 0.0, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "one": 1}))
    lines.close()
    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["nan"], row["inf"], row["minus"], row["one"]) == (None, None, None, 1)


def test_an_existing_file_is_gone_on_with(tmp_path: Path) -> None:
    for i in range(2):
        lines = JsonLines(tmp_path / "m.jsonl")
        lines.write(Row("gauges", float(i), {}))
        lines.close()
    assert [json.loads(line)["time"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [0.0, 1.0]


def test_a_place_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        JsonLines(tmp_path / "file" / "m.jsonl")
