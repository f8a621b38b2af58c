"""Every client and worker of a test is closed at its end, and no client thread may outlive it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from rollout.client import RolloutClient
from tests.rollout.client.fake_worker import FakeWorker

Make = Callable[..., Any]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield stack
    left = [thread.name for thread in threading.enumerate() if thread not in before and "rollout-client" in thread.name]
    assert not left


@pytest.fixture
def start(stack: ExitStack) -> Callable[..., FakeWorker]:
    """Start a worker."""
    return lambda *args, **options: stack.enter_context(FakeWorker(*args, **options))


@pytest.fixture
def connect(stack: ExitStack) -> Callable[..., RolloutClient]:
    """Make a client of a worker, or of an address."""

    def make(worker: FakeWorker | str, **options: Any) -> RolloutClient:
        address = worker if isinstance(worker, str) else worker.address
        return stack.enter_context(RolloutClient(address, **({"timeout": 10.0} | options)))

    return make


@pytest.fixture
def later() -> Iterator[Callable[..., Future[Any]]]:
    """Run a blocking call on another thread."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        yield pool.submit
