"""Versions of what the worker stands on, and whether they are those that it asks for."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.version import Version

from rollout.command import gpu
from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding
from rollout.command.versions import ours, version_of

PYTHON = (3, 11)


def check(config: WorkerConfig) -> Iterator[Finding]:
    yield python(sys.version_info[:2])
    extras = {"worker"}
    if config.place == "cuda":
        extras.add("cuda")
    if config.wandb_project is not None:
        extras.add("wandb")
    try:
        wanted = requires("rollout-worker") or []
    except PackageNotFoundError:
        yield Finding(
            "warn",
            "packages",
            "rollout-worker runs from its source, so that no versions are compared",
            "pip install -e '.[worker]' makes it a package",
        )
    else:
        yield from packages(wanted, extras)
    yield Finding("ok", "torch", f"{version_of('torch')}, rollout-worker {ours()}")
    if config.place == "cuda":
        yield from for_gpus()


def python(version: tuple[int, ...]) -> Finding:
    if version < PYTHON:
        return Finding("fail", "Python", platform.python_version(), "3.11 or later is needed")
    return Finding("ok", "Python", f"{platform.python_version()} on {platform.platform(terse=True)}")


def packages(wanted: Iterable[str], extras: set[str]) -> Iterator[Finding]:
    """wanted: requirements as a package lists them; of those with an extra, only `extras` count."""
    needed = [
        requirement
        for requirement in map(Requirement, wanted)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]
    wrong = 0
    for requirement in needed:
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(Version(found), prereleases=True):
            wrong += 1
            text = f"{requirement.name}{requirement.specifier}"
            yield Finding(
                "fail", "packages", f"{requirement.name} {found or 'is not installed'}", f"pip install '{text}'"
            )
    if not wrong:
        yield Finding("ok", "packages", f"{len(needed)} installed, in the versions that are asked for")


def for_gpus() -> Iterator[Finding]:
    """What serving on a GPU needs beside the driver."""
    if lacking := gpu.lacking():
        yield Finding("fail", "flashinfer", *lacking.split(": ", 1))
        return
    import torch

    # Both load libraries that must fit torch's; that they are installed says little.
    for name in ("triton", "flashinfer"):
        try:
            module = __import__(name)
        except Exception as error:
            yield Finding(
                "fail",
                name,
                f"cannot be imported with torch {torch.__version__}, {error}",
                f"install the build of {name} that fits this torch: {gpu.EXTRA}",
            )
        else:
            yield Finding("ok", name, str(getattr(module, "__version__", "of unknown version")))
    compiler = next((found for found in map(shutil.which, ("cc", "gcc", "clang")) if found), None)
    if compiler is None:
        yield Finding(
            "fail",
            "C compiler",
            "none of cc, gcc, clang is there",
            "Triton compiles its launchers with one: install gcc",
        )
    else:
        yield Finding("ok", "C compiler", compiler)
