"""`engine/*`, `env/*`, `weights/*`, `mem/*`, `wire/*`: the machine as it is now, out of two looks at the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from protocols.fields import Turn
from protocols.replies import WorkerStatus


@dataclass(slots=True)
class _Average:
    total: float = 0.0
    count: int = 0

    def add(self, total: float, count: int) -> None:
        self.total += total
        self.count += count

    def take(self, name: str) -> dict[str, float]:
        """Of what came since the last call; nothing where nothing came."""
        found = _ratio(name, self.total, self.count)
        self.total, self.count = 0.0, 0
        return found


class Gauges:
    """Rates and averages are those since the look before. processes: whose memory counts. gpu_bytes: taken there."""

    def __init__(self, processes: Iterable[int], gpu_bytes: int) -> None:
        self._processes = []
        for pid in set(processes):
            with contextlib.suppress(psutil.Error):
                self._processes.append(psutil.Process(pid))
        self._gpu_bytes = gpu_bytes
        self._before: dict[str, float] = {}
        self._first_token = _Average()
        self._per_token = _Average()
        self._weights: dict[str, float] = {"weights/failures": 0}

    def turn(self, turn: Turn) -> None:
        """A turn ended, of a trajectory that has ended as well."""
        if turn.length:
            self._first_token.add(turn.times.queue + turn.times.prefill, 1)
            self._per_token.add(turn.times.decode, turn.length - 1)

    def prepared(self, seconds: float, nbytes: int) -> None:
        self._weights |= {"weights/load_s": seconds, "weights/bytes": nbytes}

    def committed(self, paused_s: float) -> None:
        self._weights["weights/paused_s"] = paused_s

    def failed(self) -> None:
        self._weights["weights/failures"] += 1

    def look(self, status: WorkerStatus) -> dict[str, float]:
        engine, wire, environments = status.engine, status.wire, status.environments
        counted = engine | environments
        since = {name: value - self._before.get(name, 0.0) for name, value in counted.items()}
        self._before = counted
        steps = since["steps_total"]
        return {
            "engine/num_requests_running": engine["running"],
            "engine/num_requests_waiting": engine["waiting"],
            **_ratio("engine/kv_cache_usage_perc", engine["blocks_used"], engine["blocks_total"]),
            "engine/preemptions": engine["preemptions_total"],
            **_ratio("engine/prefix_cache_hit_rate", since["cached_prompt_tokens_total"], since["prompt_tokens_total"]),
            **self._first_token.take("engine/ttft_seconds_avg"),
            **self._per_token.take("engine/tpot_seconds_avg"),
            **_ratio("engine/cuda_graph_hit_rate", since["graph_steps_total"], steps),
            "engine/split_kv_steps": engine["split_steps_total"],
            **_ratio("engine/batch_size/mean", since["sampled_tokens_total"], steps),
            "env/processes": environments["processes"],
            "env/calls_waiting": environments["calls_waiting"],
            **_ratio("env/call_wait_s_avg", since["call_wait_s_total"], since["calls_total"]),
            "env/no_process": environments["no_process_total"],
            "env/process_deaths": environments["process_deaths_total"],
            "weights/version": status.weight_version,
            **self._weights,
            "mem/rss_gb": self._rss() / 1e9,
            "mem/gpu_gb": self._gpu_bytes / 1e9,
            "mem/free_blocks": engine["blocks_total"] - engine["blocks_used"],
            "wire/rx_bytes": wire["rx_bytes"],
            "wire/tx_bytes": wire["tx_bytes"],
            "wire/queue_depth": wire["queue_depth"],
            "wire/credit_stalls": wire["credit_stalls"],
        }

    def _rss(self) -> int:
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total


def _ratio(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole > 0 else {}
