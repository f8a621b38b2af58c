"""A module that behaves otherwise where a process for foreign code imports it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest


def say_from(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Callable[..., Any]:
    """Its function `say`, which returns "said". code: what it runs when any other process than this one imports it."""
    name = f"elsewhere_{abs(hash(code))}"
    inner = indent(code, "    ")
    (folder / f"{name}.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n{inner}\ndef say(): return 'said'"
    )
    monkeypatch.syspath_prepend(folder)
    found: Callable[..., Any] = importlib.import_module(name).say
    return found
