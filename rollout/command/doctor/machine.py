"""The host: memory, shared memory, open files, processes."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.memory.free_memory import host_bytes
from rollout.command.doctor.finding import Finding, gigabytes

SHARED = Path("/dev/shm")
FEW_FILES = 4096
"""Open files below which a few hundred clients and environments in processes come near the limit."""
LITTLE_SHARED = 2**30


def check() -> Iterator[Finding]:
    yield Finding("ok", "processors", f"{len(os.sched_getaffinity(0))} for this process")
    yield memory(host_bytes())
    yield shared(shutil.disk_usage(SHARED).free if SHARED.is_dir() else None)
    yield files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def memory(free: int) -> Finding:
    text = f"{gigabytes(free)} left on the host, the container's limit included"
    if free < 2 * 10**9:
        return Finding("warn", "memory", text, "the worker alone takes about one; give it more")
    return Finding("ok", "memory", text)


def shared(free: int | None) -> Finding:
    """The worker itself needs none; trainers that push weights through it do."""
    if free is None:
        return Finding("warn", "shared memory", f"{SHARED} is not there", "push weights through another directory")
    text = f"{gigabytes(free)} free in {SHARED}"
    if free < LITTLE_SHARED:
        return Finding(
            "warn",
            "shared memory",
            text,
            "weights pushed through it may not fit: docker run --shm-size, or another directory",
        )
    return Finding("ok", "shared memory", text)


def files(soft: int, hard: int) -> Finding:
    """The worker lifts the soft limit to the hard one as it starts."""
    if hard != resource.RLIM_INFINITY and hard < FEW_FILES:
        return Finding(
            "warn",
            "open files",
            f"at most {hard}",
            "many clients or tools need more: ulimit -Hn, LimitNOFILE= of systemd, docker run --ulimit",
        )
    most = "without limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    return Finding("ok", "open files", f"{most}, {soft} before the worker lifts it")
