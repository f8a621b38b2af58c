"""Result files, read and put side by side: one device and one model make one comparison, never more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.workloads import workloads

Result = dict[str, Any]
OURS = "rollout-worker"
FIELDS = ("engine", "workload", "model", "device", "forced_length_ok", "metrics")
"""What a file must have to be a result; a `driver` that is not named is "bare"."""


def read(directory: Path) -> tuple[list[Result], list[str]]:
    """The results under `directory` that may be shown, in the order of their files, and a line for each left out."""
    shown, left_out = [], []
    for path in sorted(directory.rglob("*.json")):
        result = json.loads(path.read_text())
        name = path.relative_to(directory)
        if isinstance(result, dict) and "kind" in result:
            continue  # of bench/sweep.py
        if not isinstance(result, dict) or any(field not in result for field in FIELDS):
            left_out.append(f"{name}: another kind of file")
        elif result["forced_length_ok"] is False:
            left_out.append(f"{name}: its lengths are wrong")
        elif re.search(r"_div\d+$", result["workload"]):
            left_out.append(f"{name}: a trial of small lengths")
        else:
            shown.append(result)
    return shown, left_out


def label(result: Result) -> str:
    """The workload, and in which variant: what a row of a table is of."""
    return f"{result['workload']} {result.get('variant', '')}".strip()


class Comparison:
    """All results of one model on one device. A second result of the same engine, driver and label is refused.

    workloads: the labels.
    """

    def __init__(self, device: str, model: str, results: Iterable[Result]) -> None:
        self.device = device
        self.model = model
        self._found: dict[tuple[str, str, str], Result] = {}
        for result in results:
            key = (label(result), result["engine"], result.get("driver", "bare"))
            if key in self._found:
                raise ValueError(f"two results for {', '.join(key)} of {model} on {device}: delete one")
            self._found[key] = result
        order = {name: place for place, name in enumerate(workloads())}
        names = {name for name, _, _ in self._found}
        self.workloads = sorted(names, key=lambda name: (order.get(name.split()[0], len(order)), name))
        self.peers = sorted({engine for _, engine, _ in self._found if engine != OURS})

    def result(self, workload: str, engine: str = OURS, driver: str = "bare") -> Result | None:
        return self._found.get((workload, engine, driver))

    def of(self, workload: str) -> list[Result]:
        """Peers first, then ours, then ours through the worker."""
        peers = [self.result(workload, peer) for peer in self.peers]
        found = [*peers, self.result(workload), self.result(workload, driver="zmq")]
        return [result for result in found if result is not None]

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", f"{self.device} {self.model}".lower()).strip("-")

    @property
    def title(self) -> str:
        return f"{self.model} on {self.device}"


def comparisons(results: Iterable[Result]) -> list[Comparison]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result["device"], result["model"]), []).append(result)
    return [Comparison(device, model, found) for (device, model), found in groups.items()]


def median(result: Result | None, metric: str) -> float | None:
    """None where the result, or the metric in it, is missing."""
    found = result["metrics"].get(metric) if result else None
    return None if found is None else float(found["median"])
