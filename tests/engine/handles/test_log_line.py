"""A log record on its way from one process to another."""

from __future__ import annotations

import logging
import pickle
import threading

import pytest

from engine.handles.log_line import LogLine, exception_text

NAME = "engine.somewhere"


def record_of(message: str, *arguments: object, level: int = logging.WARNING, **options: object) -> logging.LogRecord:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append  # type: ignore[method-assign]
    logger = logging.Logger(NAME)
    logger.addHandler(handler)
    logger.log(level, message, *arguments, **options)  # type: ignore[arg-type]
    return seen[0]


def crossed(record: logging.LogRecord, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    line = pickle.loads(pickle.dumps(LogLine.of(record)))
    with caplog.at_level(logging.INFO):
        line.log()
    return caplog.records[-1]


def test_text_level_time_and_fields_arrive(caplog: pytest.LogCaptureFixture) -> None:
    record = record_of("%d of 100%%", 7, extra={"rows": 7, "ratio": 0.5, "what": None})
    there = crossed(record, caplog)
    assert (there.name, there.levelno, there.getMessage()) == (NAME, logging.WARNING, "7 of 100%")
    assert (there.created, there.rows, there.ratio, there.what) == (record.created, 7, 0.5, None)
    assert there.msecs == pytest.approx(record.msecs, abs=1)


def test_a_percent_sign_in_the_text_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    assert crossed(record_of("%s", "100%d"), caplog).getMessage() == "100%d"


def test_an_exception_arrives_as_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("surprise")
    except KeyError:
        record = record_of("it failed", exc_info=True)
    there = crossed(record, caplog)
    assert there.getMessage() == "it failed"
    assert "test_log_line.py" in exception_text(there)
    assert exception_text(there).endswith("KeyError: 'surprise'")
    # As the plain formatter writes it.
    assert logging.Formatter("%(message)s").format(there).startswith("it failed\nTraceback")


def test_what_cannot_be_sent_goes_as_text(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    assert crossed(record_of("locked", extra={"lock": lock}), caplog).lock == str(lock)


def test_a_line_below_the_level_here_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LogLine(NAME, logging.DEBUG, "fine print", 0.0).log()
    assert not caplog.records
