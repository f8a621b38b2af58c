"""The address and who may use it."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import zmq

from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding
from rollout.wire.channel import BindError, Channel
from rollout.wire.curve import CurveKeys, is_local


def check(config: WorkerConfig) -> Iterator[Finding]:
    try:
        channel = Channel(config.bind, max_frame=config.limits.max_frame, heartbeat_timeout=config.heartbeat_timeout)
    except BindError as error:
        yield Finding("fail", "address", str(error))
    else:
        channel.close(linger=0.0)
        reach = "this machine alone" if is_local(config.bind) else "others"
        yield Finding("ok", "address", f"{config.bind} is free, and can be reached from {reach}")
    yield from curve(config)


def curve(config: WorkerConfig) -> Iterator[Finding]:
    if config.curve_secret is None:
        able = "there" if zmq.has("curve") else "missing from this libzmq"
        yield Finding("ok", "CURVE", f"not asked for; encryption is {able}")
        return
    if not zmq.has("curve"):
        yield Finding("fail", "CURVE", "this libzmq is built without it", "install the pyzmq wheel: pip install pyzmq")
        return
    try:
        CurveKeys.load(config.curve_secret, config.curve_clients)
    except ValueError as error:
        yield Finding("fail", "CURVE", str(error))
        return
    mode = stat.S_IMODE(config.curve_secret.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        yield Finding(
            "warn",
            "CURVE",
            f"others may read the secret key in {config.curve_secret}",
            f"chmod 600 {config.curve_secret}",
        )
    elif config.curve_clients is None:
        yield Finding(
            "warn", "CURVE", "whoever knows the worker's public key is let in", "--curve-clients names those that are"
        )
    else:
        count = len(list(config.curve_clients.glob("*.key")))
        yield Finding("ok", "CURVE", f"keys are sound, {count} client{'s' * (count != 1)} let in")
