"""What may go wrong a thousand times a second, and is worth a line a minute."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

INTERVAL_S = 60.0


class Repeated:
    """Counts, and warns at the next `tell`, then once a minute. text: of the warning, with %d for how often since."""

    def __init__(self, text: str) -> None:
        self.total = 0
        self._text = text
        self._told = 0
        self._due = 0.0

    def count(self) -> None:
        self.total += 1

    def tell(self, now: float) -> None:
        """now: `time.monotonic()`; infinity tells whatever is left."""
        if self.total > self._told and now >= self._due:
            log.warning(self._text, self.total - self._told)
            self._told, self._due = self.total, now + INTERVAL_S
