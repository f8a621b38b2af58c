"""Where the numbers go: the metrics file, its port, W&B. None of them ever keeps a worker from running."""

from __future__ import annotations

import netrc
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding
from rollout.command.versions import version_of

WANDB_HOST = "api.wandb.ai"


def check(config: WorkerConfig) -> Iterator[Finding]:
    yield metrics_file(config.metrics_file or Path("rollout-metrics") / "file")
    if config.metrics_port:
        yield port(config.metrics_host, config.metrics_port)
    yield wandb(config.wandb_project, config.wandb_mode, version_of("wandb"), logged_in(os.environ))


def metrics_file(path: Path) -> Finding:
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if os.access(folder, os.W_OK):
        return Finding("ok", "metrics file", f"{path.parent.absolute()} can be written")
    return Finding("warn", "metrics file", f"{folder.absolute()} cannot be written", "choose another --metrics-file")


def port(host: str, number: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            return Finding(
                "fail",
                "metrics port",
                f"{host}:{number} cannot be served, {error.strerror}",
                "choose another --metrics-port",
            )
    return Finding("ok", "metrics port", f"{host}:{number} is free")


def wandb(project: str | None, mode: str, version: str | None, known: bool) -> Finding:
    if project is None or mode == "disabled":
        return Finding("ok", "W&B", "not asked for")
    if version is None:
        return Finding(
            "warn", "W&B", "wandb is not installed, so that nothing is drawn", "pip install 'rollout-worker[wandb]'"
        )
    if mode == "offline" or known:
        return Finding(
            "ok", "W&B", f"wandb {version}, project {project}, {'offline' if mode == 'offline' else 'logged in'}"
        )
    return Finding(
        "warn",
        "W&B",
        f"wandb {version}, nobody is logged in, so that runs are kept on disk only",
        "wandb login, or set WANDB_API_KEY",
    )


def logged_in(environ: Mapping[str, str], file: Path | None = None) -> bool:
    """Is there something to log in with? What it is, nobody looks at."""
    if environ.get("WANDB_API_KEY"):
        return True
    try:
        return WANDB_HOST in netrc.netrc(file or Path("~/.netrc").expanduser()).hosts
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return False
