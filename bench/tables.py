"""Markdown tables of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.comparison import OURS, Comparison, Result, median
from bench.workloads import Workload, workloads

TIMED = {
    "output_tok_s": "tokens/s",
    "trajectories_s": "trajectories/s",
    "tpot_ms": "ms a token",
    "first_token_ms": "first tokens, ms",
}
SHOWN = ("torch", "cuda", "flashinfer-python", "triton", "transformers")
"""Versions worth a reader's time; the files hold more."""
DERIVED = {"gb_s": "GB/s", "floor_share": "share of the floor"}


def summary(comparison: Comparison) -> str:
    """A line a workload: tokens/s of each peer and of ours, and how they stand to each other."""
    peers, metric = comparison.peers, "output_tok_s"
    head = ["workload", "prompt / output / rows", *peers, OURS, *(f"/ {peer}" for peer in peers)]
    rows = [[*head, "over ZeroMQ", *DERIVED.values()]]
    for name in comparison.workloads:
        ours, worker = comparison.result(name), comparison.result(name, driver="zmq")
        rates = [median(comparison.result(name, peer), metric) for peer in peers]
        rate = median(ours, metric)
        ratios = [f"{rate / peer:.2f}" if rate and peer else "" for peer in rates]
        through = median(worker, metric)
        told = number(through)
        if ours and worker and through and rate and source(ours) == source(worker):
            told += f" ({100 * (through / rate - 1):+.1f} %)"
        cells = [
            name,
            describe(workloads().get(name.split()[0])),
            *map(number, rates),
            f"**{number(rate)}**" if rate else "",
        ]
        rows.append([*cells, *ratios, told, number(median(ours, "gb_s")), _percent(median(ours, "floor_share"))])
    return f"{table(rows)}\n\n{provenance(comparison)}"


def provenance(comparison: Comparison) -> str:
    """Where each engine's figures come from: commits and versions."""
    lines = []
    for engine in [OURS, *comparison.peers]:
        results = [r for name in comparison.workloads for r in comparison.of(name) if r["engine"] == engine]
        versions = {", ".join(f"{k} {v}" for k, v in r.get("versions", {}).items() if k in SHOWN) for r in results}
        if results:
            sources = ", ".join(dict.fromkeys(map(source, results)))
            lines.append(f"{engine}: {sources} ({'; '.join(sorted(versions))}).")
    return "\n".join(lines)


def details(comparison: Comparison) -> str:
    """A line a result: every metric, the spread of what was timed, and of which sources it is."""
    rows = [["workload", "engine", *TIMED.values(), *DERIVED.values(), "commit"]]
    for name in comparison.workloads:
        for result in comparison.of(name):
            through = " over ZeroMQ" if result.get("driver") == "zmq" else ""
            timed = [_with_spread(result["metrics"].get(metric)) for metric in TIMED]
            derived = [number(median(result, "gb_s")), _percent(median(result, "floor_share"))]
            rows.append([name, result["engine"] + through, *timed, *derived, source(result) + _runs(result)])
    return table(rows)


def describe(workload: Workload | None) -> str:
    """Prompt / output / rows of a flat one; groups, samples and turns of another."""
    if workload is None:
        return ""
    law = f", T={workload.temperature:g}" if workload.temperature else ""
    law += f", top-k {workload.top_k}" if workload.top_k else ""
    law += f", top-p {workload.top_p:g}" if workload.top_p < 1 else ""
    turns = sorted({len(turns) for turns in workload.groups})
    if turns != [1]:
        count = "-".join(map(str, dict.fromkeys((turns[0], turns[-1]))))
        return f"{len(workload.groups)} groups x {workload.samples}, {count} turns{law}"
    prompts = sorted({turn.appended for (turn,) in workload.groups})
    return f"{' and '.join(map(str, prompts))} / {workload.groups[0][0].sampled} / {workload.concurrency}{law}"


def number(value: float | None) -> str:
    """Whole from a thousand on, else four digits; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _with_spread(metric: dict[str, Any] | None) -> str:
    """The median, and the least and most of the runs where there are several."""
    if metric is None:
        return ""
    runs = metric["runs"]
    spread = f" ({number(min(runs))} to {number(max(runs))})" if len(runs) > 1 else ""
    return number(metric["median"]) + spread


def _runs(result: Result) -> str:
    """That a result of ours is of one run alone."""
    alone = len(result["metrics"]["output_tok_s"]["runs"]) == 1 and result.get("measured") == "here"
    return ", one run" if alone else ""


def source(result: Result) -> str:
    """The commit that was measured, and whether its tree was clean."""
    if result.get("measured") == "elsewhere":
        return "measured elsewhere"
    dirty = "" if result.get("clean") else ", not clean"
    return str(result.get("commit", ""))[:10] + dirty


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
