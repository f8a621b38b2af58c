"""Where the numbers go: the metrics file always, W&B, a port and the terminal as asked for."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollout.command.config import WorkerConfig
from rollout.metrics.feed import Feed, Sink, close_all
from rollout.metrics.health import Health
from rollout.metrics.jsonl import JsonLines
from rollout.metrics.live import LiveLine
from rollout.metrics.prometheus import Endpoint, Latest
from rollout.metrics.row import Row
from rollout.metrics.wandb_run import WandbOptions, WandbRun

log = logging.getLogger(__name__)

FINISH_S = 8.0
"""How long the last rows may take to be safe when the worker ends."""


@dataclass(frozen=True, slots=True)
class Places:
    """rows: each gets every row. line: gets the sentence of each beat."""

    health: Health
    latest: Latest
    rows: tuple[Feed[Row], ...]
    line: Feed[str] | None = None
    endpoint: Endpoint | None = None

    def put(self, row: Row) -> None:
        self.latest.put(row)
        for feed in self.rows:
            feed.put(row)

    def say(self, sentence: str) -> None:
        if self.line is not None:
            self.line.put(sentence)

    def close(self, timeout: float = FINISH_S) -> None:
        """Bring what there is to safety; `timeout` seconds at most. What has not ended by then is cut off."""
        if self.endpoint is not None:
            self.endpoint.close()
        if self.line is not None:
            close_all((self.line,), 1.0)
        close_all(self.rows, timeout)


def open_places(config: WorkerConfig) -> Places:
    """Raises OSError if the port cannot be had. Whatever else is wrong is one warning of the place's own thread."""
    health = Health()
    rows: list[Feed[Row]] = []
    latest = Latest(lambda: {feed.name: feed.dropped for feed in rows})
    endpoint = None
    if config.metrics_port is not None:
        endpoint = Endpoint(config.metrics_host, config.metrics_port, latest, health)
        log.info("metrics at http://%s:%d/metrics", config.metrics_host, endpoint.port)
    path = metrics_file(config)
    rows.append(Feed("the metrics file", partial(_json_lines, path)))
    if config.wandb_project is not None and config.wandb_mode != "disabled":
        rows.append(Feed("W&B", partial(_wandb, config)))
    line = None
    if config.live_line and config.log_format == "text" and sys.stderr.isatty():
        line = Feed[str]("the live line", _live_line, newest=True)
    return Places(health, latest, tuple(rows), line, endpoint)


def metrics_file(config: WorkerConfig) -> Path:
    if config.metrics_file is not None:
        return config.metrics_file
    return Path("rollout-metrics") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"


# Each is called on the thread of its feed.


def _json_lines(path: Path) -> Sink[Row]:
    try:
        return JsonLines(path)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}: choose another --metrics-file") from None


def _wandb(config: WorkerConfig) -> Sink[Row]:
    return WandbRun(
        WandbOptions(
            project=config.wandb_project or "",
            mode=config.wandb_mode,
            entity=config.wandb_entity,
            name=config.wandb_name,
            group=config.wandb_group,
            resume_id=config.wandb_resume_id,
            config=config.model_dump(mode="json", exclude_none=True),
        )
    )


def _live_line() -> Sink[str]:
    return LiveLine(sys.stderr)
