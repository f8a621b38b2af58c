"""What every check of a field report leaves behind: a worker as it was before.

A smoke request gives the ids it gave before; requests, KV blocks, results and child processes are back to
where they were; nothing was logged with a traceback that the check did not announce.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from tests.rollout.raw_client import RawClient, group
from tests.rollout.workers import eventually

SMOKE = group("smoke", prompt=[5, 6, 7], sampling={"temperature": 0.0})
GAUGES = ("trajectories_running", "trajectories_waiting", "results_unacknowledged", "state")
ENGINE_GAUGES = ("running", "waiting", "blocks_used")


@contextmanager
def unharmed(
    address: str,
    *,
    pid: int | None = None,
    log: Callable[[], str] | None = None,
    smoke: Sequence[int] | None = None,
    provoked: str | None = None,
    timeout: float = 30.0,
) -> Iterator[None]:
    """Look before and after the block.

    pid: of the worker; this process by default. log: what a worker of its own printed; else this process's records are
    watched. smoke: the ids of the smoke request, where the block changes them or they are known beforehand.
    provoked: what a traceback that is meant to be there matches.
    """
    process = psutil.Process(os.getpid() if pid is None else pid)
    with RawClient(address) as client, tracebacks(log) as raised:
        client.hello(timeout=timeout)
        before = smoke_ids(client, timeout) if smoke is None else [*SMOKE["prompt"].tolist(), *smoke]
        gauges, children = look(client, timeout), {child.pid for child in process.children(recursive=True)}
        yield
        # First the smoke: an engine with nothing to do says nothing new of itself.
        assert smoke_ids(client, timeout) == before
        eventually(lambda: look(client, timeout) == gauges, timeout)
        eventually(lambda: {child.pid for child in process.children(recursive=True)} <= children, timeout)
    unexpected = [text for text in raised if provoked is None or not re.search(provoked, text)]
    assert not unexpected, unexpected[0]


def smoke_ids(client: RawClient, timeout: float) -> list[int]:
    reply = client.call("submit", timeout, batch_id="smoke", groups=[SMOKE])
    assert reply["type"] == "accepted", reply
    record = client.record(timeout)
    client.event("batch_done", timeout)
    ids: list[int] = record["segments"][0]["token_ids"].tolist()
    return ids


def look(client: RawClient, timeout: float) -> dict[str, Any]:
    status = client.call("status", timeout)
    engine = {name: status["engine"].get(name, 0.0) for name in ENGINE_GAUGES}
    return {name: status[name] for name in GAUGES} | engine


@contextmanager
def tracebacks(log: Callable[[], str] | None) -> Iterator[list[str]]:
    """Collects what was logged with a traceback while the block ran; complete at its end."""
    found: list[str] = []
    if log is not None:
        start = len(log())
        yield found
        text = log()[start:]
        found += [text[match.start() :] for match in re.finditer(r"^Traceback", text, re.MULTILINE)]
        return

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                found.append(logging.Formatter().format(record))

    collector = Collector()
    logging.getLogger().addHandler(collector)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(collector)


def sampled(record: dict[str, Any]) -> list[int]:
    """The ids that the model sampled, all turns in one."""
    segment = record["segments"][0]
    ids: list[int] = segment["token_ids"][segment["loss_mask"].astype(bool)].tolist()
    return ids


def whole(record: dict[str, Any]) -> dict[str, Any]:
    """The record, after a look at what every one owes: arrays of one length, logprobs where the mask is, finite."""
    segment = record["segments"][0]
    length = len(segment["token_ids"])
    assert {len(segment[name]) for name in ("logprobs", "loss_mask", "source")} == {length}
    assert np.isfinite(segment["logprobs"]).all()
    assert not segment["logprobs"][segment["source"] != 1].any()
    if record["status"] != "failed":
        np.testing.assert_array_equal(segment["loss_mask"], segment["source"] == 1)
    return record
