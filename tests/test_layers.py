"""The house's walls: who may import whom, checked on the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"engine", "protocols", "rollout", "examples", "bench", "tests"}
MAY_IMPORT = {"engine": {"engine"}, "protocols": {"protocols"}, "rollout": {"rollout", "engine", "protocols"}}
HOST_SIDE = (
    *("request", "config", "errors", "step", "handle", "engine"),
    *(f"scheduling.{name}" for name in ("block_pool", "scheduler", "slots", "stop")),
)
ELSEWHERE = ("engine.handles.process", "engine.handles.child", "rollout.command.load")
"""Where torch would be imported twice, once by each process."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_packages_import_only_what_their_layer_may(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = {module.split(".")[0] for module in imports(path)} & OURS
        assert ours <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {ours - MAY_IMPORT[package]}"


def maps() -> Iterator[Path]:
    """Packages whose docstring is a map of their modules: all but those whose docstring is a user's first page."""
    for package in ("engine", "rollout"):
        for init in sorted((ROOT / package).rglob("__init__.py")):
            if not {"client", "doctor", "integrations"} & set(init.parts):
                yield init


@pytest.mark.parametrize("init", [*maps()], ids=lambda init: str(init.parent.relative_to(ROOT)))
def test_the_map_of_a_package_names_each_of_its_modules_once(init: Path) -> None:
    _, _, lines = (ast.get_docstring(ast.parse(init.read_text())) or "").partition("\n\n")
    named = [line.split()[0] for line in lines.splitlines()]
    there = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(named) == sorted(there - {"__init__", "__main__"})


def test_only_one_file_imports_flashinfer() -> None:
    users = [
        path.relative_to(ROOT).as_posix()
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
        if any(module.split(".")[0] == "flashinfer" for module in imports(path))
    ]
    assert set(users) <= {"engine/attention/flashinfer_paged.py"}


@pytest.mark.parametrize(
    "module",
    ["protocols", "rollout.client", "rollout.integrations.trl", *(f"engine.{name}" for name in HOST_SIDE), *ELSEWHERE],
)
def test_host_modules_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
