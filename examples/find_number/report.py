"""What the trainer shows: a live line while it runs, then a table, a plot and the numbers behind it.

    python -m examples.find_number.report DIRECTORY CURVE...

puts the curves of several runs into one plot (DIRECTORY/curves.png) and one file (DIRECTORY/curves.json).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.find_number.environment import BLIND, PERFECT


@dataclass(frozen=True)
class Round:
    """reward: mean over the trajectories that were scored. tokens: sampled. weight_version: served afterwards."""

    number: int
    reward: float
    unscored: int
    turns: float
    tokens: int
    logprob_difference: float
    weight_version: int
    rollout_s: float
    train_s: float
    reload_s: float


def progress(rounds: Iterable[Round], total: int) -> Iterator[Round]:
    """Pass the rounds on, with a live line on a terminal and a line for every tenth elsewhere."""
    console = Console()
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("waiting for the worker", total=total)
        for r in rounds:
            text = f"mean reward {r.reward:.3f}  logprob difference {r.logprob_difference:.0e}"
            bar.update(task, advance=1, description=text)
            if not console.is_terminal and (r.number + 1) % 10 == 0:
                print(f"round {r.number + 1}/{total}  {text}", flush=True)
            yield r


def write_report(rounds: Sequence[Round], folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    curve = {"seed": seed, "rounds": [asdict(r) for r in rounds]}
    (folder / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    plot([curve], folder / "reward.png")
    console = Console()
    console.print(table(rounds))
    sampled, spent = sum(r.tokens for r in rounds), sum(r.rollout_s for r in rounds)
    last = rounds[-5:]
    console.print(
        f"mean reward of the last {len(last)} rounds  {sum(r.reward for r in last) / len(last):.3f}", highlight=False
    )
    console.print(f"  best without listening     {BLIND:.3f}", highlight=False)
    console.print(f"  perfect play               {PERFECT:.3f}", highlight=False)
    console.print(f"largest logprob difference   {max(r.logprob_difference for r in rounds):.1e}", highlight=False)
    console.print(f"sampled                      {sampled} tokens in {spent:.1f} s of rollout", highlight=False)
    print(f"plot                         {folder / 'reward.png'}")
    print(f"numbers                      {folder / 'curve.json'}")
    print("next                         the trainer: examples/find_number/__main__.py; your own: README.md, A trainer")


def table(rounds: Sequence[Round]) -> Table:
    """Every tenth round, and the last."""
    shown = Table("round", "mean reward", "guesses", "rollout s", "train s", "reload s", "weights", "logprob diff")
    for column in shown.columns:
        column.justify = "right"
    for r in rounds:
        if r.number % 10 == 0 or r is rounds[-1]:
            shown.add_row(
                str(r.number + 1),
                f"{r.reward:.3f}",
                f"{r.turns:.2f}",
                f"{r.rollout_s:.2f}",
                f"{r.train_s:.2f}",
                f"{r.reload_s:.2f}",
                f"v{r.weight_version}",
                f"{r.logprob_difference:.0e}",
            )
    return shown


def plot(curves: Sequence[Mapping[str, Any]], path: Path) -> None:
    # Imported here: matplotlib takes its time, and the first round should not wait for it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for curve in curves:
        rewards = [r["reward"] for r in curve["rounds"]]
        axes.plot(range(1, len(rewards) + 1), rewards, linewidth=1.4, label=f"seed {curve['seed']}")
    axes.axhline(PERFECT, color="0.6", linestyle=":", label=f"perfect play, {PERFECT:.3f}")
    axes.axhline(BLIND, color="0.3", linestyle="--", label=f"best without listening, {BLIND:.3f}")
    axes.set(xlabel="round", ylabel="mean reward", ylim=(0, 1), title="Find the hidden number")
    axes.legend(loc="lower right", fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(folder: Path, paths: Sequence[Path]) -> None:
    curves = [json.loads(path.read_text()) for path in paths]
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("number", "reward", "logprob_difference")
    short = [{"seed": c["seed"], "rounds": [{name: r[name] for name in kept} for r in c["rounds"]]} for c in curves]
    (folder / "curves.json").write_text(json.dumps(short) + "\n")
    plot(curves, folder / "curves.png")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} FOLDER CURVE.json ...")
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
