"""Without a GPU, Triton's kernels run in its interpreter, which must be chosen before anything loads triton.

With one, workers of tests run on the CPU all the same, unless a test says otherwise."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ.setdefault("ROLLOUT_WORKER_DEVICE", "cpu")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests are shared out by name, and an object's address is another one in each process."""
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{unstable[0]} has an address in its name: give its parameters ids")


def pytest_collection_finish() -> None:
    """What five thousand collected tests are made of is garbage to nobody: it is looked through neither while it grows
    nor, by every test that makes many objects, ever after."""
    gc.enable()
    gc.freeze()
