"""One line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
LABEL = 13
"""Characters of the column of names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """what: that was looked at. found: what there is. advice: what to do, where something is to be done.

    warn: the worker runs, but worse than it could or not for everything. fail: it does not start, or will not last.
    """

    level: Level
    what: str
    found: str
    advice: str = ""

    def line(self) -> str:
        return f"{self.level:5} {self.what:{LABEL}} {self.found}{': ' if self.advice else ''}{self.advice}"


def safely(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; one that breaks is a finding too, and the others go on."""
    try:
        yield from check()
    except Exception as error:
        text = " ".join(str(error).split())
        yield Finding("fail", what, f"cannot be looked at, {type(error).__name__}: {text}")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
