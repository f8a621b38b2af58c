"""Log lines as JSON: of this process, of the engine's, of what nobody caught."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.handles.log_line import LogLine
from rollout.command.config import WorkerConfig
from rollout.command.logs import TEXT, JsonFormatter, LogFormat
from rollout.metrics.places import open_places
from tests.engine.handles.test_log_line import record_of
from tests.rollout.workers import ROOT


def as_json(record: logging.LogRecord) -> dict[str, Any]:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    return json.loads(text)  # type: ignore[no-any-return]


def test_a_line_is_one_object_with_time_level_logger_and_message() -> None:
    record = record_of("two\nlines of %s", "äöü", level=logging.INFO)
    line = as_json(record)
    assert line == {
        "time": line["time"],
        "level": "info",
        "logger": "engine.somewhere",
        "message": "two\nlines of äöü",
    }
    assert datetime.fromisoformat(line["time"]).timestamp() == pytest.approx(record.created, abs=1e-3)
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


def test_extras_are_fields_whatever_they_are() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    assert as_json(record_of("x", extra={"round": 7, "odd": Odd(), "nan": float("nan")}))["fields"] == pytest.approx(
        {"round": 7, "odd": "odd", "nan": float("nan")}, nan_ok=True
    )


def test_a_traceback_is_in_the_object() -> None:
    try:
        raise ValueError("no good")
    except ValueError:
        line = as_json(record_of("failed", exc_info=True))
    assert line["message"] == "failed"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: no good")


def test_a_line_of_the_engine_process_is_such_an_object_too(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("no good")
    except ValueError:
        sent = LogLine.of(record_of("failed", exc_info=True, extra={"step": 3}))
    sent.log()
    line = as_json(caplog.records[-1])
    assert (line["logger"], line["message"], line["fields"]) == ("engine.somewhere", "failed", {"step": 3})
    assert line["exception"].endswith("ValueError: no good")


def test_the_text_form_shows_the_same_traceback(caplog: pytest.LogCaptureFixture) -> None:
    LogLine("engine", logging.ERROR, "failed", 0.0, "Traceback: here").log()
    assert logging.Formatter(TEXT).format(caplog.records[-1]).endswith("ERROR engine: failed\nTraceback: here")


PROGRAM = """
import logging, threading, warnings
from rollout.command.logs import set_up_logs
set_up_logs("info", "json")
logging.getLogger("a").debug("not wanted")
warnings.warn("old", stacklevel=1)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("last")
"""


def test_warnings_and_what_nobody_caught_are_objects_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    warning, thread, last = map(json.loads, done.stderr.splitlines())
    assert (warning["logger"], warning["level"]) == ("py.warnings", "warning")
    assert "old" in warning["message"]
    assert thread["message"] == "ZeroDivisionError: division by zero"
    assert "<lambda>" in thread["exception"]
    assert (last["level"], last["message"]) == ("critical", "KeyError: 'last'")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_the_live_line_stands_between_no_objects(
    log_format: LogFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    config = WorkerConfig(weights=Path("w"), log_format=log_format, metrics_file=tmp_path / "m.jsonl")
    with contextlib.closing(open_places(config)) as places:
        assert (places.line is None) == (log_format == "json")
