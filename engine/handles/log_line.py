"""A log record as plain data, for another process to log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""What every record has."""


def extras(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in USUAL}


def exception_text(record: logging.LogRecord) -> str:
    """The traceback that belongs to a record, or ''."""
    trace = record.exc_text or (logging.Formatter().formatException(record.exc_info) if record.exc_info else None)
    return "\n".join(part for part in (trace, record.stack_info) if part)


@dataclass(frozen=True, slots=True)
class LogLine:
    """created: seconds since 1970. exception: a traceback or ''. fields: what was given as `extra`, as plain values."""

    name: str
    level: int
    text: str
    created: float
    exception: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, record: logging.LogRecord) -> Self:
        # A value that cannot be sent must not end the process that logs it.
        fields = {
            name: value if isinstance(value, str | int | float | bool | None) else str(value)
            for name, value in extras(record).items()
        }
        return cls(record.name, record.levelno, record.getMessage(), record.created, exception_text(record), fields)

    def log(self) -> None:
        """Log it here, if lines of this level are wanted."""
        logger = logging.getLogger(self.name)
        if logger.isEnabledFor(self.level):
            record = logger.makeRecord(self.name, self.level, "", 0, self.text, (), None, extra=dict(self.fields))
            record.created = self.created
            record.msecs = self.created % 1 * 1000
            record.exc_text = self.exception or None
            logger.handle(record)
