"""Calls of tools, run: whatever a tool does, one text comes back for each call, in the order of the calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from typing import Any, Literal

from rollout.environments.calls import Call as Started
from rollout.environments.calls import Raised
from rollout.environments.errors import NoProcess, NotImported, ProcessDied, Reported, describe
from rollout.environments.pool import NOBODY, Owner, Pool
from rollout.tools.parse import BadCall, Call
from rollout.tools.results import LIMIT, as_text
from rollout.tools.tool import BadArguments, Tool, check

Problem = Literal["malformed", "unknown_tool", "bad_arguments", "too_many", "raised", "timeout"]
BAD: frozenset[Problem] = frozenset(("malformed", "unknown_tool", "bad_arguments", "too_many"))
"""Problems of the call itself, not of the tool."""
UNWIND_S = 1.0
"""How long a coroutine that was given up may take to unwind."""
DEADLINE_S = 30.0
WAIT_S = 300.0
MAX_CALLS = 16


@dataclass(frozen=True, slots=True)
class Result:
    """What the model reads of one call. name: of the tool; "" where the call names none. problem: what went wrong."""

    name: str
    text: str
    problem: Problem | None = None

    @property
    def bad_call(self) -> bool:
        return self.problem in BAD


@dataclass(frozen=True, slots=True)
class Runner:
    """deadline_s: of one call, from its start. wait_s: of one call, for a process. limit: characters of one result.

    max_calls: of one turn; more are not run. pool: processes for plain functions; without it they run on threads, which
    cannot be ended: a call that was given up goes on there unheard. owner: for whom.
    """

    tools: Mapping[str, Tool]
    deadline_s: float = DEADLINE_S
    limit: int = LIMIT
    max_calls: int = MAX_CALLS
    pool: Pool | None = None
    owner: Owner = NOBODY
    wait_s: float = WAIT_S

    async def run(self, calls: Sequence[Call | BadCall]) -> list[Result]:
        """All at once. Raises NoProcess and NotImported, and gives the other calls up: no model should see of those."""
        tasks = [asyncio.ensure_future(self._one(call, i)) for i, call in enumerate(calls)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, call: Call | BadCall, index: int) -> Result:
        if isinstance(call, BadCall):
            return self._failed("", call.problem, "malformed")
        if index >= self.max_calls:
            return self._failed(call.name, f"no more than {self.max_calls} calls are run in one turn", "too_many")
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            return self._failed(call.name, f"there is no tool {call.name[:64]!r}; known: {known}", "unknown_tool")
        try:
            return Result(call.name, await self._text(tool, call.arguments))
        except BadArguments as error:
            return self._failed(call.name, f"bad arguments: {error}", "bad_arguments")
        except TimeoutError:
            return self._failed(call.name, f"timeout: no result within {self.deadline_s:g} s", "timeout")
        except (NoProcess, NotImported):
            raise
        except ProcessDied as error:  # which process it was is nothing to learn from
            return self._failed(call.name, f"the tool did not return: {error.how}", "raised")
        except Exception as error:
            return self._failed(call.name, describe(error), "raised")

    async def _text(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        function, required = tool.function, tuple(tool.parameters.get("required", ()))
        if inspect.iscoroutinefunction(function):
            value = await self._here(function, **check(function, arguments, required))
            if isinstance(value, str):
                return as_text(value, self.limit)
            return str(await self._here(as_text, value, self.limit))  # others' code, again, and it may take its time
        args = (function, dict(arguments), required, self.limit)
        if self.pool is not None and _has_address(function):
            kind, text = await self.pool.call(
                _there, args, self.deadline_s, owner=self.owner, wait=self.wait_s, imports=function
            )
        else:
            kind, text = await self._here(_called, *args)
        if kind == "bad_arguments":
            raise BadArguments(text)
        if kind == "raised":
            raise Reported(text)
        return str(text)

    async def _here(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """On the loop where it is a coroutine function, else on a thread."""
        started = Started(functools.partial(function, **kwargs), *args)
        try:
            await asyncio.wait({started.task}, timeout=self.deadline_s)
            if not started.task.done():
                raise TimeoutError
        finally:
            if not started.task.done():
                started.interrupt()
                await asyncio.wait({started.task}, timeout=UNWIND_S)
        outcome = started.task.result()
        if isinstance(outcome, Raised):
            if isinstance(outcome.error, NoProcess):
                raise outcome.error
            # As a text: a cancellation or an exit that a tool raises is not ours.
            raise Reported(describe(outcome.error))
        return outcome.value

    def _failed(self, name: str, message: str, problem: Problem) -> Result:
        return Result(name, as_text(f"error: {message}", self.limit), problem)


def _there(*call: Any) -> Any:
    """In a process: as `_called`. The next call there is another trajectory's, and begins in the same working
    directory."""
    with chdir("."):
        return _called(*call)


def _called(function: Callable[..., Any], arguments: Mapping[str, Any], required: Sequence[str], limit: int) -> Any:
    """The result as text, so that it may be of any class and size: whoever asked has only that to look at."""
    try:
        value = function(**check(function, arguments, required))
        return _awaited(value, limit) if inspect.isawaitable(value) else ("text", as_text(value, limit))
    except BadArguments as error:
        return "bad_arguments", str(error)
    except NoProcess:
        raise
    except BaseException as error:
        return "raised", as_text(describe(error), limit)


async def _awaited(value: Awaitable[Any], limit: int) -> tuple[str, str]:
    """Of a plain function that wraps a coroutine function."""
    try:
        return "text", as_text(await value, limit)
    except NoProcess:
        raise
    except BaseException as error:
        return "raised", as_text(describe(error), limit)


def _has_address(function: Callable[..., Any]) -> bool:
    """Is it a plain function that another process finds by its name?"""
    if not inspect.isfunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(function):
        return False
    module = sys.modules.get(function.__module__)
    return function.__module__ != "__main__" and getattr(module, function.__qualname__, None) is function
