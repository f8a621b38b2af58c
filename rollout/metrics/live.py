"""One line on the terminal that says what goes on, below the log."""

from __future__ import annotations

import logging
import os
from typing import TextIO

from rollout.metrics.health import Beat

CLEAR = "\r\x1b[2K"
WIDTH = 80
"""Of a terminal that does not say how wide it is."""


class LiveLine:
    """Draws text over the last line of a terminal. Log lines that go to the same stream come above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is stream
        ]
        for handler in self._handlers:
            handler.setStream(_Above(stream))

    def write(self, text: str) -> None:
        room = (os.get_terminal_size(self._stream.fileno()).columns or WIDTH) - 1
        if len(text) > room:  # half a number would be another number
            text = text[: room + 2].rpartition("  ")[0] or text[:room]
        self._stream.write(f"{CLEAR}{text}")
        self._stream.flush()

    def close(self) -> None:
        for handler in self._handlers:
            handler.setStream(self._stream)
        self._stream.write(CLEAR)
        self._stream.flush()

    def abandon(self) -> None:
        """A terminal that was stopped keeps its thread, which ends with the process."""


class _Above:
    """A stream that first wipes the live line out; the next beat draws it again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(CLEAR + text)

    def flush(self) -> None:
        self._stream.flush()


def sentence(beat: Beat, before: Beat | None, progress: tuple[int, int, int] | None) -> str:
    """The line. progress: (step, ended, accepted) of the oldest round."""
    stats = beat.stats
    parts = [f"version {beat.version}"]
    if beat.state != "ready":
        parts.append(beat.state)
    if progress is not None:
        step, ended, accepted = progress
        parts.append(f"step {step}: {ended}/{accepted} trajectories")
    parts.append(f"{stats.running} running, {stats.waiting} waiting")
    if before is not None and beat.time > before.time:
        tokens = stats.sampled_tokens_total - before.stats.sampled_tokens_total
        parts.append(f"{tokens / (beat.time - before.time):,.0f} tokens/s")
    if stats.blocks_total:
        parts.append(f"KV {100 * stats.blocks_used / stats.blocks_total:.0f} %")
    return "  ".join(parts)
