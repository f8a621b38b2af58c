"""What a long start says of itself."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.start.build import load_engine
from engine.start.progress import CAPTURING, READING, LoggedProgress, amount
from tests.rigs import write_rand


def test_a_load_says_how_much_it_reads(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_engine(
        write_rand(tmp_path),
        EngineConfig(max_running=2, max_step_tokens=32, max_context=64),
        progress=lambda *step: seen.append(step),
    )
    reading = [(done, of) for what, done, of in seen if what == READING]
    size = loaded.weights.arena.nbytes
    assert reading[0][0] < size
    assert reading[-1] == (size, size)
    assert [done for done, _ in reading] == sorted(done for done, _ in reading)


def test_lines_come_once_an_interval_and_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("engine.start.progress.time.monotonic", lambda: now)
    progress = LoggedProgress()
    with caplog.at_level(logging.INFO):
        for done in range(29):
            progress(CAPTURING, done, 28)
            now += 0.125
    assert caplog.messages == [f"capturing graphs: {n} of 28" for n in (8, 16, 24, 28)]


def test_the_first_line_about_a_thing_waits_its_interval_however_long_the_last_thing_is_ago(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("engine.start.progress.time.monotonic", lambda: now)
    progress = LoggedProgress()
    with caplog.at_level(logging.INFO):
        progress(READING, 10**6, 10**6)
        now = 200.0
        progress(CAPTURING, 0, 2)
        progress(CAPTURING, 1, 2)
        progress(CAPTURING, 2, 2)
    assert caplog.messages == ["reading weights: 1.0 of 1.0 MB", "capturing graphs: 2 of 2"]


def test_it_crosses_to_another_process(caplog: pytest.LogCaptureFixture) -> None:
    progress = pickle.loads(pickle.dumps(LoggedProgress()))
    with caplog.at_level(logging.INFO):
        progress(READING, 8_045_000_000, 8_045_000_000)
    assert caplog.messages == ["reading weights: 8.0 of 8.0 GB"]


@pytest.mark.parametrize(
    ("done", "of", "text"),
    [(0, 10**9, "0.0 of 1.0 GB"), (999, 10**9 - 1, "0.0 of 1000.0 MB"), (1_234_567, 2_000_000, "1.2 of 2.0 MB")],
)
def test_amounts(done: int, of: int, text: str) -> None:
    assert amount(done, of) == text
