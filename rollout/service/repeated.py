"""What may go wrong a thousand times a second, and is worth a line a minute."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

INTERVAL_S = 60.0


class Repeated:
    """Counts, and warns at the next `tell`, then once a minute: `what`, how often since, and which was the last."""

    def __init__(self, what: str) -> None:
        self.total = 0
        self._what = what
        self._last = ""
        self._told = 0
        self._due = 0.0

    def count(self, which: str) -> None:
        self.total += 1
        self._last = which

    def tell(self, now: float) -> None:
        """now: `time.monotonic()`; infinity tells whatever is left."""
        if self.total > self._told and now >= self._due:
            log.warning("%s: %d, the last %.200s", self._what, self.total - self._told, self._last)
            self._told, self._due = self.total, now + INTERVAL_S
