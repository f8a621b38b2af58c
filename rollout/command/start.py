"""From a configuration to a worker that serves, and down again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.handle import EngineHandle
from engine.start.collector import spare_the_collector
from rollout.command.config import WorkerConfig
from rollout.command.descriptors import lift_limit
from rollout.command.summary import Summary, age
from rollout.metrics.gauges import Gauges
from rollout.metrics.places import Places, open_places
from rollout.metrics.watch import Metrics
from rollout.service.service import Served, Service, Timeouts
from rollout.wire.channel import BindError, Channel
from rollout.wire.curve import CurveKeys

log = logging.getLogger(__name__)

LEAVE_S = 0.3
"""How long cancelled tasks may take to unwind at the very end."""


class StartError(Exception):
    """The worker cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """handle: not started. summary: what is said when it serves. processes: this one, and that of the engine.

    gpu_bytes: taken on the GPU.
    """

    handle: EngineHandle
    served: Served
    summary: Summary
    processes: tuple[int, ...] = ()
    gpu_bytes: int = 0


def run_worker(config: WorkerConfig, load: Callable[[WorkerConfig], Loaded]) -> int:
    """Bind, load, serve until a signal comes, drain. Returns the exit code; raises StartError."""
    lift_limit()
    # What may be taken or not allowed first: that should not be learned after a minute of loading.
    if (file := config.ready_file) is not None:
        if file.is_dir():
            raise StartError(f"--ready-file {file}: is a directory: name a file")
        if not os.access(file.parent, os.W_OK):
            raise StartError(f"--ready-file {file}: its directory is not there or cannot be written")
    try:
        curve = CurveKeys.load(config.curve_secret, config.curve_clients) if config.curve_secret else None
        channel = Channel(
            config.bind, max_frame=config.limits.max_frame, heartbeat_timeout=config.heartbeat_timeout, curve=curve
        )
    except (BindError, ValueError) as error:
        raise StartError(str(error)) from None
    try:
        with contextlib.closing(_open_places(config)) as places:
            loaded = load(config)
            metrics = Metrics(
                places,
                Gauges(loaded.processes, loaded.gpu_bytes),
                interval=config.metrics_interval,
                self_check=config.self_check,
            )
            loop = asyncio.new_event_loop()
            try:
                return loop.run_until_complete(_serve(config, channel, loaded, metrics))
            finally:
                _leave(loop)
    finally:
        channel.close(linger=0.0)


def _open_places(config: WorkerConfig) -> Places:
    try:
        return open_places(config)
    except OSError as error:
        what, name = "port", f"{config.metrics_host}:{config.metrics_port}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            what, name = "host", config.metrics_host
        raise StartError(
            f"--metrics-{what}: {name} cannot be served, {error.strerror}: choose another {what}"
        ) from None


async def _serve(config: WorkerConfig, channel: Channel, loaded: Loaded, metrics: Metrics) -> int:
    service = Service(
        channel,
        loaded.handle,
        loaded.served,
        limits=config.limits,
        timeouts=Timeouts(config.client_timeout, config.drain_timeout, config.ack_timeout),
        at_once=config.max_trajectories,
        max_waiting=config.max_waiting,
        observer=metrics,
    )
    _catch_signals(service)

    def ready() -> None:
        spare_the_collector()
        here = {"address": channel.address, "pid": os.getpid(), "boot_id": service.boot_id, "seconds": round(age(), 1)}
        if config.log_format == "json":
            log.info("ready", extra={**loaded.summary.fields(), **here})
        else:
            lines = [*loaded.summary.lines(), "ready " + " ".join(f"{name}={value}" for name, value in here.items())]
            # Whoever started the worker may have stopped listening: that is no reason not to serve.
            with contextlib.suppress(OSError, ValueError):
                print("\n".join(lines), flush=True)
        if config.ready_file is not None:
            try:
                write_ready_file(config.ready_file, address=channel.address, boot_id=service.boot_id)
            except OSError as error:
                raise StartError(f"--ready-file {config.ready_file}: {error.strerror}") from None
        watching.append(asyncio.get_running_loop().create_task(metrics.watch(service)))

    watching: list[asyncio.Task[None]] = []
    try:
        drained = await service.run(ready)
        if drained:
            log.info("drained: the worker ends")
        return 0 if drained else 1
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """End what is left, and do not wait for environments that will not be ended (`asyncio.run` would)."""
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=LEAVE_S))
    loop.close()


def _catch_signals(service: Service) -> None:
    """The first SIGTERM or SIGINT drains, the next one exits at once."""
    seen = 0

    def caught(number: signal.Signals) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            log.warning("%s again: leaving at once", number.name)
            logging.shutdown()
            os._exit(128 + number)
        log.info("%s: draining", number.name)
        service.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, caught, number)


def write_ready_file(path: Path, *, address: str, boot_id: str) -> None:
    """All of it or nothing: whoever waits for the file never reads half of one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid(), "boot_id": boot_id}))
    partial.replace(path)
