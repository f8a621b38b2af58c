from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report_fields


def test_the_environment_speaks_for_a_copy_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc123")
    assert report_fields.commit() == "abc123"
    for told, expected in (("1", True), ("true", True), ("0", False), ("false", False)):
        monkeypatch.setenv("BENCH_CLEAN", told)
        assert report_fields.clean() is expected


def test_outside_of_a_repository_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.delenv("BENCH_CLEAN", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(report_fields, "ROOT", tmp_path)
    assert report_fields.commit() == "unknown"
    assert report_fields.clean() is None


def test_versions_and_device_are_of_this_machine() -> None:
    assert {"python", "torch", "numpy"} <= report_fields.versions().keys()
    assert "threads" in report_fields.device_name("cpu")


def test_a_measure_keeps_its_runs() -> None:
    assert report_fields.measured([3.0, 1.0, 2.000001]) == {"median": 2.0, "runs": [3.0, 1.0, 2.0]}
    assert report_fields.measured([123456.0])["runs"] == [123460.0]


def test_a_record_is_json_in_a_folder_that_need_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    report_fields.write({"engine": "x"}, path)
    assert json.loads(path.read_text()) == {"engine": "x"}
