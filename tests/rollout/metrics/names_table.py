"""The table of names in docs/metrics.md: `python -m tests.rollout.metrics.names_table` rewrites it."""

from __future__ import annotations

from rollout.metrics.names import NAMES
from tests.rollout.workers import ROOT

DOCUMENT = ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- names:begin -->", "<!-- names:end -->"


def table() -> str:
    lines = ["| name | unit | meaning |", "|---|---|---|"]
    for name, meaning in NAMES.items():
        grows = " (only grows)" if meaning.counter else ""
        lines.append(f"| `{name}` | {meaning.unit} | {meaning.text}{grows} |")
    return "\n".join(lines)


def parts() -> tuple[str, str, str]:
    """The document before, in and after the table."""
    before, rest = DOCUMENT.read_text().split(BEGIN)
    middle, after = rest.split(END)
    return before, middle.strip(), after


if __name__ == "__main__":
    before, _, after = parts()
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
