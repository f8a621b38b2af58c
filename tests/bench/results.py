"""Result files for the tests of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.report_fields import measured, write

GPU, CPU = "NVIDIA H200", "Some CPU, 2 threads"


def result(workload: str = "A", engine: str = "rollout-worker", tok_s: float = 300.0, **fields: Any) -> dict[str, Any]:
    """fields: of the result, or the median of a metric by its name."""
    names = ("trajectories_s", "tpot_ms", "first_token_ms", "gb_s", "floor_share")
    metrics = {"output_tok_s": measured([tok_s * 0.99, tok_s, tok_s * 1.01])}
    metrics |= {name: measured([fields.pop(name)]) for name in names if name in fields}
    return {
        "engine": engine,
        "driver": "bare",
        "workload": workload,
        "model": "qwen3-4b",
        "device": GPU,
        "commit": "0123456789abcdef",
        "clean": True,
        "measured": "here",
        "versions": {"torch": "2.11.0", "numpy": "2.0"},
        "forced_length_ok": True,
        "metrics": metrics,
        **fields,
    }


def write_all(folder: Path, *results: dict[str, Any]) -> Path:
    for number, each in enumerate(results):
        write(each, folder / each["engine"] / f"{number}.json")
    return folder
