from __future__ import annotations

import logging
import os
import pty
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from engine.handle import EngineStats
from rollout.metrics.health import Beat
from rollout.metrics.live import CLEAR, LiveLine, sentence


def beat(time: float, state: str = "ready", **stats: int) -> Beat:
    return Beat(time, state, 12, EngineStats(**stats), time)


def test_the_line_says_what_goes_on() -> None:
    before = beat(10.0, sampled_tokens_total=1000)
    now = beat(12.0, running=64, waiting=8, sampled_tokens_total=7240, blocks_total=200, blocks_used=142)
    assert sentence(now, before, (40, 100, 512)) == (
        "version 12  step 40: 100/512 trajectories  64 running, 8 waiting  3,120 tokens/s  KV 71 %"
    )
    assert sentence(beat(0.0, state="paused"), None, None) == "version 12  paused  0 running, 0 waiting"


@contextmanager
def terminal(width: int = 100) -> Iterator[tuple[TextIO, int]]:
    """A stream to a terminal, and the descriptor on which its screen is read."""
    screen, end = pty.openpty()
    termios.tcsetwinsize(end, (24, width))
    with os.fdopen(end, "w", buffering=1) as stream:
        yield stream, screen
    os.close(screen)


def shown(screen: int, end: str) -> str:
    """What is on the screen up to `end`; a terminal hands it over in pieces."""
    text = ""
    while not text.endswith(end):
        text += os.read(screen, 65536).decode().replace("\r\n", "\n")
    return text


def test_log_lines_stand_above_the_live_line() -> None:
    root = logging.getLogger()
    with terminal() as (stream, screen):
        handler = logging.StreamHandler(stream)
        root.addHandler(handler)
        try:
            line = LiveLine(stream)
            line.write("one")
            logging.getLogger("test").warning("a line of the log")
            line.write("two")
            line.close()
            logging.getLogger("test").warning("after")
        finally:
            root.removeHandler(handler)
        assert shown(screen, "after\n") == f"{CLEAR}one{CLEAR}a line of the log\n{CLEAR}two{CLEAR}after\n"


@pytest.mark.parametrize(("width", "room"), [(40, 39), (0, 79)], ids=["forty", "unknown"])
def test_a_line_is_shorter_than_the_terminal_is_wide(width: int, room: int) -> None:
    with terminal(width) as (stream, screen):
        LiveLine(stream).write("x" * 500)
        print("|", end="", file=stream, flush=True)
        assert shown(screen, "|") == CLEAR + "x" * room + "|"


@pytest.mark.parametrize(("width", "text"), [(20, "one  two  three"), (16, "one  two  three"), (15, "one  two")])
def test_what_does_not_fit_is_left_out_whole(width: int, text: str) -> None:
    with terminal(width) as (stream, screen):
        LiveLine(stream).write("one  two  three")
        print("|", end="", file=stream, flush=True)
        assert shown(screen, "|") == f"{CLEAR}{text}|"
