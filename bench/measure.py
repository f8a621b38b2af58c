"""One workload measured: a warm-up, the runs, the figures made of them, a result file and a table.

Whoever drives an engine gives a function that does one run; what is timed and how it is told is the same for all.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import report_fields
from bench.comparison import label
from bench.make_model import SHAPES
from bench.workloads import Workload, workloads
from engine.config import BLOCK_SIZE
from engine.memory.kv_size import kv_bytes_per_block
from engine.model.config import ModelConfig, parse_model_config
from engine.weights.arena import parameters

COPY_BANDWIDTH = {"NVIDIA H200": 4.255e12}
"""Bytes per second of a device copy, read and write, as measured: what a floor is counted with."""


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a workload. wall: seconds from the first submit to the last token on the host.

    lengths_ok: every turn gave exactly the tokens that were asked for, each with a finite logprob. counters: what the
    engine counted meanwhile.
    """

    wall: float
    lengths_ok: bool
    counters: dict[str, int] = field(default_factory=dict)


VARY = (
    "dtype",
    "max_running",
    "max_step_tokens",
    "kv_tokens",
    "admission",
    "decode_path",
    "shuffled",
    "turns",
    "wait",
)
"""Options of the drivers that change what is measured, beside the workload."""

Driver = Callable[[Workload, int], Run]
"""A workload and a seed to one run of it."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes that a decode step must read: all weights but an untied embedding once, and each token's KV once."""

    weights: int
    kv_per_token: float

    @classmethod
    def of(cls, model: ModelConfig, itemsize: int) -> Reads:
        kept = [p.numel for p in parameters(model) if model.tied or p.name != "embedding"]
        return cls(sum(kept) * itemsize, kv_bytes_per_block(model, itemsize) / BLOCK_SIZE)

    def step(self, workload: Workload) -> float:
        return self.weights + workload.mean_context * self.kv_per_token


def model_name(model: ModelConfig) -> str:
    """The name of a shape that is measured, else what tells it apart."""
    for name, shape in SHAPES.items():
        if replace(parse_model_config(shape), eos_ids=model.eos_ids, max_positions=model.max_positions) == model:
            return name
    return f"{model.architecture}-{model.num_layers}x{model.hidden_size}"


def measure(
    workload: Workload, drive: Driver, runs: int, reads: Reads, bandwidth: float | None, *, seed: int = 0
) -> dict[str, Any]:
    """`metrics` and what belongs to them, of one warm-up and `runs` runs with seeds from `100 * seed` on.

    A workload of several turns is warmed up by its first turns alone. A flat one is run at three lengths: its own,
    `short` (their difference is the time per token, prompts taken out), and 1 (the time to all first tokens).
    """
    done: list[list[Run]] = []
    for number in range(runs + 1):
        # Seeds differ everywhere: what one run computed is of no use to another.
        lengths = [workload] + ([workload.cut(workload.short), workload.cut(1)] if workload.short else [])
        if number == 0:
            lengths = [workload if workload.short else workload.first_turns()]
        passes = [drive(length, 100 * seed + 10 * number + i) for i, length in enumerate(lengths)]
        walls = "  ".join(f"{p.wall:.3f}" for p in passes)
        print(f"  {workload.name} {number or 'warm-up'}: {walls} s; {steps(passes[0].counters)}", flush=True)
        if number:
            done.append(passes)
    return {
        "forced_length_ok": all(run.lengths_ok for passes in done for run in passes),
        "metrics": _metrics(workload, done, reads, bandwidth),
        "wall_s": [[round(run.wall, 4) for run in passes] for passes in done],
        "counters": [passes[0].counters for passes in done],
    }


def _metrics(workload: Workload, done: list[list[Run]], reads: Reads, bandwidth: float | None) -> dict[str, Any]:
    walls = [passes[0].wall for passes in done]
    metrics: dict[str, Any] = {}
    rate = [workload.sampled_tokens / wall for wall in walls]
    if workload.short:
        timed = workload.groups[0][0].sampled - workload.short
        seconds = [(passes[0].wall - passes[1].wall) / timed for passes in done]
        if workload.decode_only:
            rate = [workload.concurrency / s for s in seconds]
        metrics["tpot_ms"] = report_fields.measured(1e3 * s for s in seconds)
        metrics["first_token_ms"] = report_fields.measured(1e3 * passes[2].wall for passes in done)
        bytes_read = reads.step(workload)
        metrics["gb_s"] = report_fields.measured(bytes_read / 1e9 / s for s in seconds)
        if bandwidth:
            metrics["floor_share"] = report_fields.measured(bytes_read / bandwidth / s for s in seconds)
    else:
        metrics["trajectories_s"] = report_fields.measured(workload.concurrency / wall for wall in walls)
    return {"output_tok_s": report_fields.measured(rate)} | metrics


def record(
    engine: str,
    driver: str,
    workload: Workload,
    model: ModelConfig,
    device: str,
    dtype: str,
    settings: dict[str, Any],
    variant: str = "",
) -> dict[str, Any]:
    """All fields of a result but those of `measure`. engine: whose; driver: "bare", or "zmq" through the worker."""
    return {
        "engine": engine,
        "driver": driver,
        "workload": workload.name,
        "variant": variant,
        "temperature": workload.temperature,
        "top_k": workload.top_k,
        "top_p": workload.top_p,
        "logprobs": "of every sampled token",
        "model": model_name(model),
        "dtype": dtype,
        "device": report_fields.device_name(device),
        "commit": report_fields.commit(),
        "clean": report_fields.clean(),
        "measured": "here",
        "versions": report_fields.versions(),
        "settings": settings,
    }


def save(result: dict[str, Any], directory: Path) -> Path:
    """<directory>/<engine>[-zmq]/<device>-<model>-<workload>[-<variant>].json"""
    folder = str(result["engine"]) + ("" if result["driver"] == "bare" else f"-{result['driver']}")
    device = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    variant = result["variant"].replace(" ", "-")
    path = directory / folder / f"{device}-{result['model']}-{result['workload']}{variant}.json"
    report_fields.write(result, path)
    return path


def table(results: Iterable[dict[str, Any]]) -> str:
    """A line a workload, for the terminal."""
    names = ("output_tok_s", "trajectories_s", "tpot_ms", "first_token_ms", "gb_s", "floor_share")
    results = list(results)
    width = max(20, *(len(label(result)) + 1 for result in results))
    lines = [f"{'workload':{width}}" + "".join(f"{name:>16}" for name in names) + "  lengths"]
    for result in results:
        metrics = result["metrics"]
        cells = [f"{metrics[name]['median']:,.5g}" if name in metrics else "" for name in names]
        ok = "ok" if result["forced_length_ok"] else "WRONG"
        lines.append(f"{label(result):{width}}" + "".join(f"{cell:>16}" for cell in cells) + f"  {ok}")
    return "\n".join(lines)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all drivers share."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--weights", required=True, type=Path, help="checkpoint directory (see bench.make_model)")
    found.add_argument("--workload", nargs="+", required=True, choices=["all", *workloads()], metavar="NAME")
    found.add_argument("--runs", type=int, default=3, help="timed runs after the warm-up")
    found.add_argument("--seed", type=int, default=0, help="of ids and noise; a worker's cache may remember those of 0")
    found.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    found.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    found.add_argument("--max-running", type=int, help="rows of a step (default: what the workloads named need)")
    found.add_argument("--max-step-tokens", type=int, default=16384)
    found.add_argument("--kv-tokens", type=int, help="KV pool; without it what the workloads need, or a GPU has left")
    found.add_argument(
        "--admission", choices=["whole", "open"], default="whole", help="of trajectories of several turns"
    )
    found.add_argument("--json-dir", type=Path, default=report_fields.ROOT / "bench" / "results")
    found.add_argument("--shrink", type=int, default=1, metavar="N", help="divide rows and lengths by N: a trial")
    return found


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, and as `variant` those of them that change a figure and are not as by default; it is part of a
    result's name, so that no other run of the same workload takes its place."""
    args = options.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if name in VARY and value != options.get_default(name)}
    flags = {name: "--" + name.replace("_", "-") for name in given}
    args.variant = " ".join(flags[name] if value is True else f"{flags[name]} {value}" for name, value in given.items())
    return args


def chosen(args: argparse.Namespace) -> list[Workload]:
    names = list(workloads()) if "all" in args.workload else args.workload
    return [workloads()[name].shrunk(args.shrink) for name in names]


def by_prefix_cache(works: list[Workload]) -> list[list[Workload]]:
    """Those without and those with a prefix cache: one engine each."""
    halves = [[work for work in works if work.prefix_cache == on] for on in (False, True)]
    return [half for half in halves if half]


def steps(counters: Mapping[str, int]) -> str:
    """What kinds of steps a run was made of, for the terminal."""
    count, prompt, graph, padding = (
        counters.get(f"{name}_total", 0) for name in ("steps", "prompt_steps", "graph_steps", "padding_tokens")
    )
    return f"{count} steps, {prompt} with prompt tokens, {count - graph} eager; {padding} tokens of padding"


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """How far the counters of `EngineStats` went meanwhile."""
    names = [name for name in after if name.endswith("_total") and name != "blocks_total"]
    return {name: int(after[name] - before[name]) for name in names}
