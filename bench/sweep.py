"""The attention sweep and the step profile, as tables and a plot of docs/performance.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

from bench.tables import number, source, table

matplotlib.use("agg")
import matplotlib.pyplot as plt

PATHS = {
    "split": "FlashInfer, split, graph",
    "one_chunk": "FlashInfer, one chunk, graph",
    "eager": "FlashInfer, eager",
    "tiles": "ours",
    "runs": "ours, shared prefixes once",
}
"""Names of bench.attention's paths, in words."""
PARTS = ("step_ms", "attention", "linears", "small", "sampling", "copies", "other", "gaps")


def attention(path: Path, figures: Path) -> str:
    """Both tables of a sweep's file, under what it was measured on; draws the plot."""
    found = json.loads(path.read_text())
    figure = figures / "attention.png"
    plot(found["rows"], figure)
    blocks = [
        f"{found['device']}, {source(found)}; microseconds of one layer.",
        table(
            [
                ["rows x context", "floor", *(PATHS[name] for name in ("split", "one_chunk", "eager", "tiles"))],
                *(_cells(_shape(row), row, ("split", "one_chunk", "eager", "tiles")) for row in found["rows"]),
            ]
        ),
        f"![decode attention](figures/{figure.name})",
        "Groups whose samples share their prompt's pages:",
        table(
            [
                ["groups x samples, prompt + own", "floor", *(PATHS[name] for name in ("split", "tiles", "runs"))],
                *(_cells(_group(row), row, ("split", "tiles", "runs")) for row in found["groups"]),
            ]
        ),
    ]
    return "\n\n".join(blocks)


def profile(path: Path) -> str:
    """The table of a profile's file: milliseconds of each part of a step."""
    found = json.loads(path.read_text())
    names = [name for name in PARTS if any(name in point for point in found["points"])]
    rows = [["step", *("whole" if name == "step_ms" else name for name in names)]]
    for point in found["points"]:
        what = f"{point['kind']} {point['rows']} x {point['context']}"
        what += f" + {prompt}" if (prompt := point.get("prompt")) else ""
        rows.append([what, *(f"{point[name]:.3f}" if name in point else "" for name in names)])
    return f"{found['model']} on {found['device']}, {source(found)}; milliseconds.\n\n{table(rows)}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over the floor by context, a panel a batch size; dashed where one row is 16 times longer."""
    batches = sorted({row["batch"] for row in rows})
    figure, panels = plt.subplots(
        1, len(batches), figsize=(2.6 * len(batches), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, batch in zip(panels[0], batches, strict=True):
        for color, name in enumerate(("split", "one_chunk", "eager", "tiles")):
            for skew in (False, True):
                line = [row for row in rows if row["batch"] == batch and row["skew"] == skew]
                axes.plot(
                    [row["context"] for row in line],
                    [row[name] / row["floor"] for row in line],
                    color=f"C{color}",
                    linestyle="--" if skew else "-",
                    marker="o",
                    markersize=3,
                    label=None if skew else PATHS[name],
                )
        axes.set(xscale="log", yscale="log", title=f"{batch} rows", xlabel="context")
        axes.axhline(1.0, color="black", linewidth=0.8)
    panels[0][0].set_ylabel("time over the floor")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _cells(what: str, row: dict[str, Any], paths: tuple[str, ...]) -> list[str]:
    best = min(row[name] for name in paths if name != "eager")
    times = [f"**{row[name]:.1f}**" if row[name] == best else f"{row[name]:.1f}" for name in paths]
    return [what, f"{row['floor']:.1f}", *times]


def _shape(row: dict[str, Any]) -> str:
    long = f", one row {number(16 * row['context'])}" if row["skew"] else ""
    return f"{row['batch']} x {number(row['context'])}{long}"


def _group(row: dict[str, Any]) -> str:
    return f"{row['groups']} x {row['samples']}, {number(row['prefix'])} + {number(row['suffix'])}"
