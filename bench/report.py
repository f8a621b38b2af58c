"""From the result files to what a reader sees: tables in README.md and docs/performance.md, plots in docs/figures/.

    python -m bench.report [--results DIR] [--root DIR]

The tables go between `<!-- bench:begin -->` and `<!-- bench:end -->` of each document that has them; those of the
attention sweep and of the step profile between such marks of their own. A result whose
lengths were wrong, or of a workload that was shrunk for a trial, is left out and named.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.comparison import Comparison, comparisons, read
from bench.plot import plot
from bench.report_fields import ROOT
from bench.sweep import attention, profile
from bench.tables import details, summary

ATTENTION, PROFILE = "attention.json", "profile.json"
DOCUMENTS: dict[str, Callable[[Comparison], str]] = {"README.md": summary, "docs/performance.md": details}


def report(results: Path, root: Path) -> list[str]:
    """Write plots and tables under `root`. Returns the results left out, a line each."""
    shown, left_out = read(results)
    found = comparisons(shown)
    plots = {comparison.slug: plot(comparison, root / "docs" / "figures") for comparison in found}
    for name, table in DOCUMENTS.items():
        path = root / name
        if path.exists():
            blocks = [_block(comparison, table, plots[comparison.slug], path.parent) for comparison in found]
            path.write_text(between_markers(path.read_text(), "bench", "\n\n".join(blocks)))
    page = root / "docs" / "performance.md"
    if page.exists():
        if (results / ATTENTION).exists():
            block = attention(results / ATTENTION, root / "docs" / "figures")
            page.write_text(between_markers(page.read_text(), "attention", block))
        if (results / PROFILE).exists():
            page.write_text(between_markers(page.read_text(), "profile", profile(results / PROFILE)))
    return left_out


def _block(comparison: Comparison, table: Callable[[Comparison], str], figure: Path | None, folder: Path) -> str:
    parts = [f"**{comparison.title}**", table(comparison)]
    if figure is not None:
        parts.append(f"![{comparison.title}]({figure.relative_to(folder).as_posix()})")
    return "\n\n".join(parts)


def between_markers(text: str, name: str, block: str) -> str:
    """`text` with `block` in place of what stood between the markers of `name`, if it has them. Raises ValueError if
    the second is missing."""
    start, stop = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, begin, rest = text.partition(start)
    if not begin:
        return text
    _, end, tail = rest.partition(stop)
    if not end:
        raise ValueError(f"{start} has no {stop}")
    return f"{head}{start}\n{block}\n{stop}{tail}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md and docs/ are")
    args = parser.parse_args(argv)
    for line in report(args.results, args.root):
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
