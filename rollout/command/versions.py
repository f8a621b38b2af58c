"""Which versions of what this worker stands on, without importing any of it."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zmq

DRIVER_FILE = Path("/proc/driver/nvidia/version")


def version_of(package: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def ours() -> str:
    return version_of("rollout-worker") or "not installed"


def driver(file: Path = DRIVER_FILE) -> str | None:
    """The kernel's NVIDIA driver, as 580.95.05; None where there is none."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text())
    except OSError:
        return None
    return found[0] if found else None


def versions() -> dict[str, str]:
    """Name -> version of what matters to results and speed, as far as it is there."""
    found = {
        "rollout-worker": ours(),
        "Python": platform.python_version(),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
        "flashinfer": version_of("flashinfer-python"),
        "triton": version_of("triton"),
        "driver": driver(),
        "libzmq": zmq.zmq_version(),
    }
    return {name: text for name, text in found.items() if text is not None}
