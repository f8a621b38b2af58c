"""What a worker says of itself when it is ready: lines to read, or fields of one JSON log line."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.handle import EngineInfo
from rollout.command.config import WorkerConfig
from rollout.command.versions import versions
from rollout.service.service import Served

FREE: Final = "free"
LABEL: Final = 9
"""Characters of the column of labels."""


@dataclass(frozen=True, slots=True)
class Summary:
    """rows: label -> text. memory: device -> tag -> bytes."""

    rows: Mapping[str, str]
    memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """The rows, then memory as a table: a column a device, a row a tag."""
        return [*(f"{label:{LABEL}}{text}" for label, text in self.rows.items()), *table(self.memory)]

    def fields(self) -> dict[str, Any]:
        return {**self.rows, "memory": {device: dict(sizes) for device, sizes in self.memory.items()}}


def summarise(config: WorkerConfig, info: EngineInfo, served: Served) -> Summary:
    model = served.model
    home = "a process of its own" if config.in_process else "a thread"
    return Summary(
        {
            "model": f"{config.weights}: {model.architecture}, {model.dtype} on {info.gpu or config.place}, "
            f"in {home}, {model.vocab_size} ids",
            "weights": f"version {served.weight_version}, {served.weight_digest}",
            "KV cache": f"{info.kv_tokens} tokens; {config.max_running} requests at once, context {model.max_context}",
            "envs": ", ".join(served.environments.names),
            "versions": ", ".join(f"{name} {text}" for name, text in (versions() | {"torch": info.torch}).items()),
            "start": f"imports {info.import_s:.1f} s, load {info.load_s:.1f} s",
        },
        by_device(info),
    )


def by_device(info: EngineInfo) -> dict[str, dict[str, int]]:
    """device -> tag -> bytes: what was taken, then what else there is, free last."""
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for device, tag, nbytes in (*info.memory, *info.rest):
        sizes[device][tag] += nbytes
    return {device: dict(tags) for device, tags in sizes.items()}


def table(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Aligned, the largest first, in MB of a million bytes. total: all but what is free."""
    if not memory:
        return []
    largest = Counter[str]()
    for sizes in memory.values():
        largest.update(sizes)
    tags = [tag for tag, _ in largest.most_common() if tag != FREE]
    width = max(len(tag) for tag in [*tags, "memory"]) + 2
    rows = [f"{'memory':{width}}" + "".join(f"{device + ' MB':>14}" for device in memory)]
    rows += [f"  {tag:{width - 2}}" + "".join(_cell(sizes.get(tag)) for sizes in memory.values()) for tag in tags]
    totals = [sum(size for tag, size in sizes.items() if tag != FREE) for sizes in memory.values()]
    rows.append(f"  {'total':{width - 2}}" + "".join(map(_cell, totals)))
    rows.append(f"  {FREE:{width - 2}}" + "".join(_cell(sizes.get(FREE)) for sizes in memory.values()))
    return [row.rstrip() for row in rows]


def _cell(size: int | None) -> str:
    return " " * 14 if size is None else f"{size / 1e6:>14,.1f}"


def age(stat: Path = Path("/proc/self/stat"), uptime: Path = Path("/proc/uptime")) -> float:
    """Seconds since this process was started, interpreter included."""
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(uptime.read_text().split()[0]) - started
