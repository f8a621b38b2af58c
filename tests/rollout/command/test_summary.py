"""What is said when a worker is ready."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.handle import EngineInfo
from rollout.command.logs import JsonFormatter
from rollout.command.summary import Summary, age, by_device, table
from tests.engine.child_engines import MODEL
from tests.engine.handles.test_log_line import record_of

INFO = EngineInfo(
    MODEL,
    1,
    "sha256:0",
    160,
    (
        ("cuda", "weights", 8_045_000_000),
        ("cpu", "weights staging", 8_045_000_000),
        ("cuda", "kv pool", 100_000_000_000),
        ("cuda", "step input", 1_000_000),
        ("cuda", "step input", 2_000_000),
        ("cpu", "step input", 500_000),
    ),
    "2.11.0",
    (("cuda", "graphs, temporaries", 2_000_000_000), ("cuda", "free", 30_000_000_000), ("cpu", "free", 9_000_000_000)),
)


def test_memory_is_an_aligned_table_that_adds_up() -> None:
    assert table(by_device(INFO)) == [
        "memory                      cuda MB        cpu MB",
        "  kv pool                 100,000.0",
        "  weights                   8,045.0",
        "  weights staging                         8,045.0",
        "  graphs, temporaries       2,000.0",
        "  step input                    3.0           0.5",
        "  total                   110,048.0       8,045.5",
        "  free                     30,000.0       9,000.0",
    ]
    assert table({}) == []


def test_the_same_is_one_json_line() -> None:
    summary = Summary({"model": "m", "KV cache": "160 tokens"}, by_device(INFO))
    assert summary.lines()[:2] == ["model    m", "KV cache 160 tokens"]
    line = json.loads(JsonFormatter().format(record_of("ready", extra={**summary.fields(), "pid": 7})))
    assert line["fields"]["memory"]["cuda"]["step input"] == 3_000_000
    assert (line["fields"]["KV cache"], line["fields"]["pid"]) == ("160 tokens", 7)


def test_age_counts_from_the_start_of_the_process_with_the_interpreter() -> None:
    code = "from pathlib import Path; from rollout.command.summary import age; print(age())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # The imports alone take a while.
    assert 0.05 < float(done.stdout) < 60


def test_age_of_a_process_with_spaces_and_brackets_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (a) b) c) S " + " ".join(["0"] * 18) + f" {100 * os.sysconf('SC_CLK_TCK')} 0")
    (tmp_path / "uptime").write_text("130.50 1000.00\n")
    assert age(tmp_path / "stat", tmp_path / "uptime") == pytest.approx(30.5)
