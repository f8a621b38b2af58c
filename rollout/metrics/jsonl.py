"""The numbers as JSON lines: always there, whatever becomes of the dashboards."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rollout.metrics.row import Row


class JsonLines:
    """Appends to `path`, making its directory. Raises OSError. A number that is not finite is written as null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: Row) -> None:
        self._file.write(as_json(row) + "\n")

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        """A file system that hangs keeps its thread, which ends with the process."""


def as_json(row: Row) -> str:
    values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    return json.dumps({"kind": row.kind, "time": round(row.time, 3), **values}, allow_nan=False)
