"""The fields that every result file under bench/results shares: what ran where, of which sources, median and runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "pyzmq")


def commit() -> str:
    """The commit measured: BENCH_COMMIT where set (a copy without history), else git's HEAD, else "unknown"."""
    return os.environ.get("BENCH_COMMIT") or _git("rev-parse", "HEAD") or "unknown"


def clean() -> bool | None:
    """Were the tracked files those of the commit? BENCH_CLEAN (1 or 0) where set, else git's word, else None."""
    told = os.environ.get("BENCH_CLEAN")
    if told:
        return told.lower() in ("1", "true", "yes")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    return None if status is None else not status


def versions() -> dict[str, str]:
    """Of Python, of the packages that are installed, and of CUDA where torch was built for it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    try:
        import torch
    except ImportError:
        return found
    return found | {"torch": torch.__version__} | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def device_name(device: str) -> str:
    """The name that tables are sorted by: the GPU's, or the CPU's with the threads that torch may use."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measured(runs: Iterable[float]) -> dict[str, Any]:
    """{"median", "runs"} with four digits that count."""
    values = [_round(run) for run in runs]
    return {"median": _round(statistics.median(values)), "runs": values}


def write(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
