"""docs/field-reports.md names every report, and only tests that there are."""

from __future__ import annotations

import ast
import fnmatch
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "field-reports.md"
REPORTS = (
    *(1, 3, 5, 7, 10, 11, 13, 14, 16, 18, 20, 22, 25, 27, 28),
    *(30, 32, 34, 35, 38, 41, 42, 44, 46, 49, 51, 52),
    *(53, 56, 57, 59, 61, 62, 64, 65, 69, 72, 73),
)
FOUND = 12
"""Reports of our own search, at least."""


def rows() -> list[tuple[str, str, str, str]]:
    found = []
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| report |")):
            report, what, tests, outcome = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((report, what, tests, outcome))
    return found


@cache
def named_in(file: Path) -> tuple[str, ...]:
    tree = ast.parse(file.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return tuple(node.name for node in functions if node.name.startswith("test_"))


def test_every_report_has_one_row() -> None:
    numbers = [int(match[1]) for report, *_ in rows() if (match := re.match(r"(\d+), ", report))]
    assert numbers == sorted(REPORTS)
    sources = [re.sub(r"^\d+, ", "", report) for report, *_ in rows()]
    assert len(set(sources)) == len(sources), "a thread is named twice"
    assert len(sources) - len(numbers) >= FOUND
    for source in sources:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source), source


def test_every_row_is_whole() -> None:
    for report, what, tests, outcome in rows():
        assert what, report
        assert tests, report
        assert re.match(r"(held|mended)\b", outcome), (report, outcome)


def test_every_test_that_is_named_exists() -> None:
    for report, _, tests, _ in rows():
        named = re.findall(r"`([^`]+)`", tests)
        assert " ".join(f"`{name}`" for name in named) == tests, report
        for name in named:
            file, _, pattern = name.partition("::")
            assert pattern.startswith("test_"), name
            assert fnmatch.filter(named_in(TESTS / file), pattern), f"{report}: there is no {name}"


def test_every_test_of_a_field_report_is_named() -> None:
    """A report's test that the document does not lead to is a report nobody finds."""
    patterns: dict[str, list[str]] = {}
    for _, _, tests, _ in rows():
        for name in re.findall(r"`([^`]+)`", tests):
            file, _, pattern = name.partition("::")
            patterns.setdefault(file, []).append(pattern)
    for file in sorted(TESTS.rglob("test_field_report*.py")):
        for name in named_in(file):
            if re.match(r"test_(report_)?\d+_", name):
                known = patterns.get(str(file.relative_to(TESTS)), [])
                assert any(fnmatch.fnmatch(name, pattern) for pattern in known), f"{file.name}::{name}"
