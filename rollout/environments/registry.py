"""Environments by name. The wire carries names only; the code behind a name was chosen where the worker started."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from protocols import fields
from protocols.errors import BadRequest
from rollout.environments.base import Environment, EnvironmentFactory, EnvironmentSource, said_by
from rollout.environments.checks import BadAnswer, check_class
from rollout.environments.errors import describe
from rollout.environments.isolated import Isolated
from rollout.environments.pool import NOBODY, Owner, Pool
from rollout.environments.remote import Remote
from rollout.environments.scripted import Scripted
from rollout.tools.environment import Placed, ToolEnvironment, check_tools, placed
from rollout.tools.modules import environment_of, imported

ENTRY_POINTS = "rollout_worker.environments"
"""Entry-point group: `name = "module:Class"`."""

BUILT_IN = ("remote", "scripted", "tools")
LEAST = 16


def processes_by_default() -> int:
    """For all environments and tools that do not run in the worker: one for each processor that it may use, and 16 at
    least, since most of them wait."""
    return max(LEAST, len(os.sched_getaffinity(0)))


class Registry:
    """`scripted`, `remote`, `tools`, and the plug-ins: those of the command line, then installed entry points."""

    def __init__(
        self,
        plugins: Mapping[str, EnvironmentFactory],
        installed: Sequence[EntryPoint] = (),
        *,
        isolated: Container[str] = (),
        processes: int = LEAST,
        tools: type[ToolEnvironment] | None = None,
    ) -> None:
        """isolated: names whose environments run in processes whatever their class says.

        processes: at most so many, half of them for environments. tools: what `tools` makes; None refuses it.
        """
        # A call of a tool needs a whole process, and environments may hold all of those they share.
        self._pool = Pool(processes // 2)
        self._tool_pool = Pool(processes - processes // 2, "tools")
        self._tools = None if tools is None else Placed(tools, self._tool_pool)
        self._isolated = isolated
        self._plugins = {name: self._placed(name, factory) for name, factory in plugins.items()}
        self._installed = {entry.name: entry for entry in installed}
        for name in BUILT_IN:
            if name in self._plugins or name in self._installed:
                raise ValueError(f"environment {name!r} is built in: choose another name")

    @classmethod
    def load(cls, specs: Sequence[str] = (), *, processes: int = LEAST, tools: Sequence[str] = ()) -> Registry:
        """specs: `name=module:Class` or `name=module:Class,process`, one per `--env`; each is imported now.

        tools: modules of the functions that `tools` offers.

        An entry point is imported when it is first asked for: one broken package must not stop the worker.
        Raises ValueError, naming the spec, where it is malformed, given twice or cannot be imported.
        """
        plugins: dict[str, EnvironmentFactory] = {}
        isolated: set[str] = set()
        for spec in specs:
            where, comma, how = spec.partition(",")
            if comma and how != "process":
                raise ValueError(f"--env {spec}: {how!r} is no place for an environment: write process, or nothing")
            name, factory = _load(where)
            if name in plugins:
                raise ValueError(f"--env {spec}: the name {name!r} is given twice")
            plugins[name] = factory
            if comma:
                isolated.add(name)
        return cls(
            plugins,
            tuple(entry_points(group=ENTRY_POINTS)),
            isolated=isolated,
            processes=processes,
            tools=environment_of(tools) if tools else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        lacking = () if self._tools else ("tools",)
        return tuple(sorted({*BUILT_IN, *self._plugins, *self._installed}.difference(lacking)))

    @property
    def chat_roles(self) -> dict[str, tuple[str, ...]]:
        """What the classes of plug-ins that are imported say, where they say it for every configuration."""
        said = {name: getattr(said_by(factory), "chat_roles", ()) for name, factory in self._plugins.items()}
        return {name: tuple(roles) for name, roles in said.items() if not callable(roles)}

    def resolve(self, environment: fields.Environment, owner: Owner = NOBODY) -> EnvironmentSource:
        """The environment of a trajectory, `owner`, of a submitted group, or what makes it.

        Raises BadRequest for a name that is unknown (the message lists the known ones) or cannot be imported.
        """
        source = self._source(environment)
        return dataclasses.replace(source, owner=owner) if isinstance(source, Placed) else source

    def at_hand(self, environment: fields.Environment) -> bool:
        """Is nothing of others' to be imported for it, nor to be called, before it is known what it takes?"""
        name = environment.name
        if name not in self._plugins:
            return name not in self._installed
        says = said_by(self._plugins[name])
        return not any(callable(getattr(says, said, None)) for said in ("chat_roles", "tool_schemas"))

    def _source(self, environment: fields.Environment) -> EnvironmentSource:
        name = environment.name
        if name == "scripted":
            return Scripted(environment.script)
        if name == "remote":
            return Remote()
        if name == "tools" and self._tools is not None:
            return self._tools
        if name == "tools":
            raise BadRequest("start the worker with --tools MODULE, whose functions they are", field="environment.name")
        if name in self._plugins:
            return self._plugins[name]
        if name in self._installed:
            return self._import(self._installed[name])
        raise BadRequest(
            f"{name!r} is no environment of this worker; known: {', '.join(self.names)}", field="environment.name"
        )

    @property
    def stats(self) -> dict[str, float]:
        """`WorkerStatus.environments`: see `PoolStats`. Processes and deaths are those of environments and tools; calls
        those of tools alone, which wait for a process to themselves."""
        environments, tools = self._pool.stats, self._tool_pool.stats
        return {
            "processes": environments.processes + tools.processes,
            "calls_waiting": tools.calls_waiting,
            "calls_total": tools.calls_total,
            "call_wait_s_total": tools.wait_s_total,
            "no_process_total": environments.unserved_total + tools.unserved_total,
            "process_deaths_total": environments.deaths_total + tools.deaths_total,
        }

    async def close(self) -> None:
        """End the processes of environments."""
        await self._pool.close()
        await self._tool_pool.close()

    def _placed(self, name: str, factory: EnvironmentFactory) -> EnvironmentFactory:
        try:
            check_class(factory)
            check_tools(factory)
        except (BadAnswer, ValueError) as error:
            raise ValueError(f"environment {name!r}: {error}") from None
        if name not in self._isolated and getattr(factory, "isolation", "worker") != "process":
            return placed(factory, self._tool_pool)
        try:
            pickle.dumps(factory)
        except Exception as error:
            raise ValueError(f"environment {name!r} cannot run in a process: {error}") from error
        return Isolated(self._pool, factory)

    def _import(self, entry: EntryPoint) -> EnvironmentFactory:
        try:
            factory = self._placed(entry.name, entry.load())
        except (Exception, SystemExit) as error:
            raise BadRequest(
                f"{entry.name!r} cannot be imported: {describe(error)}", field="environment.name"
            ) from error
        self._plugins[entry.name] = factory
        return factory


def _load(spec: str) -> tuple[str, EnvironmentFactory]:
    name, equals, target = spec.partition("=")
    module, colon, attribute = target.partition(":")
    if not (name and equals and module and colon and attribute):
        raise ValueError(f"--env {spec}: must read name=module:Class")
    try:
        found: Any = imported(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--env {spec}: {error}") from error
    if not callable(found):
        raise ValueError(f"--env {spec}: {attribute} is not callable")
    # Whatever else is callable says only when it is called what it makes.
    if isinstance(found, type) and not issubclass(found, Environment):
        raise ValueError(f"--env {spec}: {attribute} is no subclass of rollout.environments.base.Environment")
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"--env {spec}: {attribute} does not define {', '.join(lacking)}")
    return name, found
