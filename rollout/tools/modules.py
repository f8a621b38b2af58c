"""The environment `tools`, of the functions of modules that were named where the worker started."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout.environments.base import Context
from rollout.environments.errors import describe
from rollout.tools.environment import ToolEnvironment
from rollout.tools.tool import Tool

OWN = ("reward", "reply")
"""Functions of a module that are no tools but methods of the environment, each called with the `Episode`."""


class ModuleTools(ToolEnvironment):
    """Of functions, which keep nothing of an episode: all there is to know of it is its messages and its progress."""

    async def snapshot(self) -> dict[str, Any]:
        return self.progress()

    async def restore(self, context: Context, state: Mapping[str, Any]) -> None:
        await self.go_on(context, state)


def environment_of(modules: Sequence[str]) -> type[ToolEnvironment]:
    """Tools are the functions in a module's `__all__`, or without one its public functions that are written there.

    Raises ValueError, naming the module, where it cannot be imported or has none, and where two have one name.
    """
    tools: dict[str, Tool] = {}
    own: dict[str, Any] = {}
    for name in modules:
        try:
            found = _functions(imported(name))
            for function in found:
                called = function.__name__
                if called in tools or called in own:
                    raise ValueError(f"{called!r} is in an earlier module too")
                if called in OWN:
                    own[called] = staticmethod(function)
                else:
                    tools[called] = Tool.of(function)
            if not found:
                raise ValueError("the module has no public function")
        except ValueError as error:
            raise ValueError(f"--tools {name}: {error}") from error
    return type("Tools", (ModuleTools,), {"tools": tuple(tools.values()), **own})


def imported(name: str) -> ModuleType:
    """The module of that name. Raises ValueError, which says what may be wrong with the name."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (name, name.split(".")[0])
        advice = "; it must be installed, in the working directory or on PYTHONPATH" if missing else ""
        if name.endswith(".py"):
            meant = name.removesuffix(".py").removeprefix("./")
            meant = Path(meant).name if meant.startswith("/") else meant.replace("/", ".")
            advice = f"; a module is named without .py, {meant}, and must be in the working directory or on PYTHONPATH"
        raise ValueError(f"{describe(error)}{advice}") from error


def _functions(module: ModuleType) -> list[Callable[..., Any]]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        if missing := [name for name in listed if not hasattr(module, name)]:
            raise ValueError(f"its __all__ names {missing[0]!r}, which it does not have")
        return [found for name in listed if _is_function(found := getattr(module, name))]
    return [
        found
        for name, found in vars(module).items()
        if _is_function(found)
        and (found.__module__, found.__name__) == (module.__name__, name)
        and not name.startswith("_")
    ]


def _is_function(found: Any) -> bool:
    """Also one that `functools.cache` or the like has wrapped in an object."""
    return callable(found) and inspect.isfunction(inspect.unwrap(found))
