"""The bars of a comparison: tokens/s over a peer's."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from bench.comparison import OURS, Comparison, median
from bench.tables import number

matplotlib.use("agg")
import matplotlib.pyplot as plt


def plot(comparison: Comparison, folder: Path) -> Path | None:
    """Tokens/s over the first peer's, a group of bars a workload; None where no peer has a workload of ours."""
    peer = next(iter(comparison.peers), None)
    if peer is None:
        return None
    shared = {name: rate for name in comparison.workloads if (rate := _rate(comparison, name, peer, "bare"))}
    names = [name for name in shared if len(comparison.of(name)) > 1]
    if not names:
        return None
    series = [(engine, "bare") for engine in [*comparison.peers, OURS]] + [(OURS, "zmq")]
    series = [each for each in series if any(_rate(comparison, name, *each) for name in names)]
    figure, axes = plt.subplots(figsize=(max(6.0, 1.1 * len(names)), 4.2), layout="constrained")
    width = 0.8 / len(series)
    for i, (engine, driver) in enumerate(series):
        rates = {k: rate for k, name in enumerate(names) if (rate := _rate(comparison, name, engine, driver))}
        places = [k + (i - (len(series) - 1) / 2) * width for k in rates]
        heights = [rate / shared[names[k]] for k, rate in rates.items()]
        bars = axes.bar(places, heights, width, label=engine + (" over ZeroMQ" if driver == "zmq" else ""))
        axes.bar_label(bars, [f" {number(rate)}" for rate in rates.values()], rotation=90, fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(f"tokens/s over those of {peer}")
    axes.set_title(comparison.title)
    axes.margins(y=0.2)
    figure.legend(loc="outside lower center", ncols=len(series), fontsize=8)
    path = folder / f"{comparison.slug}.png"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _rate(comparison: Comparison, workload: str, engine: str, driver: str) -> float | None:
    return median(comparison.result(workload, engine, driver), "output_tok_s")
