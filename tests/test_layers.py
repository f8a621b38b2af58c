"""The house's walls: who may import whom, checked on the source of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
OURS = {"engine", "protocols", "rollout", "examples", "bench", "tests"}
MAY_IMPORT = {"engine": {"engine"}, "protocols": {"protocols"}, "rollout": {"rollout", "engine", "protocols"}}
HOST_SIDE = (
    *("request", "config", "errors", "step", "handle", "engine"),
    *(f"scheduling.{name}" for name in ("block_pool", "scheduler", "slots", "stop")),
)
ROOMS = (
    *("generation", "environments", "chat", "tools"),
    *("environments.registry", "environments.adapters", "trajectory"),  # of all kinds of environments
    *("metrics.observer", "wire", "batches"),
    *("command.config", "command.versions", "service", "metrics", "command", "local", "__main__"),
    *("client", "integrations"),
)
"""Of rollout, from the lowest: a module imports nothing of another room above its own, except for types to be checked.
Some modules stand lower or higher than the rest of their room."""
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


def floor(module: str) -> int:
    """Place of a module of rollout in `ROOMS`, which name it or a package around it."""
    found = [room for room in ROOMS if f"{module}.".startswith(f"{room}.")]
    assert found, f"rollout.{module} is in no room: say in ROOMS above which others it stands"
    return ROOMS.index(max(found, key=len))


def run_imports(node: ast.AST) -> Iterator[str]:
    """Modules of rollout that are imported when the code runs, not only where types are checked."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("rollout."):
            yield str(child.module).removeprefix("rollout.")
        yield from run_imports(child)


def test_rooms_of_rollout_import_only_those_below_them() -> None:
    for path in sorted((ROOT / "rollout").rglob("*.py")):
        if path.parent.name == "rollout" and path.stem == "__init__":
            continue
        module = ".".join(path.relative_to(ROOT / "rollout").with_suffix("").parts).removesuffix(".__init__")
        others = {
            name for name in run_imports(ast.parse(path.read_text())) if name.split(".")[0] != module.split(".")[0]
        }
        above = {name for name in others if floor(name) > floor(module)}
        assert not above, f"rollout.{module} imports {above}, which stand above it"


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


WITH_THE_CLIENT_ALONE = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if (top := name.partition(".")[0]) in %s:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Blocker())
"""


def with_the_client_alone(code: str, more: set[str] = frozenset()) -> subprocess.CompletedProcess[str]:
    """Run where nothing is installed but what the package takes without an extra, and what that takes. more: packages
    that are there besides, with what they take."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] + [*more]
    found: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        wanted += requires(requirement.name) or []
    others = {
        top
        for top, packages in packages_distributions().items()
        if not {package.lower().replace("_", "-") for package in packages} & found
    }
    blocked = WITH_THE_CLIENT_ALONE % (others - OURS)
    return subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )


def test_a_client_takes_what_the_package_takes_without_an_extra() -> None:
    done = with_the_client_alone(
        """
from protocols.errors import ConnectionLost
from rollout.client import AsyncRolloutClient, RolloutClient
import rollout.integrations.trl, rollout.local
from rollout.environments.adapters import bfcl, reasoning_gym, textarena  # for their `messages`
with RolloutClient("tcp://127.0.0.1:9", timeout=0.1) as client:
    try:
        client.submit(client.group([1, 2], n=2, script=[[3]], top_p=0.5))
    except ConnectionLost:
        print("asked")
"""
    )
    assert (done.stdout, done.stderr) == ("asked\n", "")


@pytest.mark.parametrize(("more", "lacks"), [(set(), "torch"), ({"torch"}, "safetensors")])
def test_a_push_says_what_it_takes_more(more: set[str], lacks: str) -> None:
    """torch: of a trainer, which has it."""
    done = with_the_client_alone(
        """
import asyncio
from protocols.errors import RolloutError
from rollout.client import AsyncRolloutClient, NotInstalled, RolloutClient
with RolloutClient("tcp://127.0.0.1:9", timeout=0.1) as client:
    try:
        client.push_weights({}, 1)
    except NotInstalled as error:
        print(error, isinstance(error, RolloutError), isinstance(error, ImportError))
async def main():
    async with AsyncRolloutClient("tcp://127.0.0.1:9", timeout=0.1) as client:
        try:
            await client.push_weights({}, 1)
        except NotInstalled as error:
            print(error.code)
asyncio.run(main())
""",
        more,
    )
    said = f"push_weights needs torch and safetensors, and {lacks} is not installed: pip install {lacks}"
    assert (done.stdout, done.stderr) == (f"{said} True True\nnot_installed\n", "")


def test_a_worker_says_what_it_takes_more() -> None:
    done = with_the_client_alone("import rollout.__main__ as worker; sys.exit(worker.main())")
    assert done.returncode == 1
    assert "is not installed; a worker takes more than a client: pip install 'rollout-worker[worker]'" in done.stderr
    assert "Traceback" not in done.stderr
