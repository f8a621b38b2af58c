"""Log lines of the worker and its engine: to read, or one JSON object each.

As JSON: time (UTC, ISO 8601), level, logger, message; fields, what was given as `extra`; exception, a traceback.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

from engine.handles.log_line import exception_text, extras

LogFormat = Literal["text", "json"]

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if fields := extras(record):
            line["fields"] = fields
        if exception := exception_text(record):
            line["exception"] = exception
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up_logs(level: str, format_: LogFormat) -> None:
    """Everything that is logged goes to standard error; so do warnings and, as JSON, what nobody caught."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if format_ == "json" else logging.Formatter(TEXT))
    logging.basicConfig(handlers=[handler], level=level.upper())
    logging.captureWarnings(True)
    if format_ == "json":
        sys.excepthook = _uncaught
        threading.excepthook = lambda args: _uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("rollout").critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
