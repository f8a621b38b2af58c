"""`tools`: a conversation with tools, scored at its end.

    class Weather(ToolEnvironment):
        tools = (temperature, convert)                  # functions; their schemas come from hints and docstrings

        def reward(self, episode: Episode) -> float:
            return float("12" in episode.answer)

Each turn is read for calls; they run at once, and what they returned goes back in their order. A turn without calls is
an answer: the user says something more (`reply`), or the trajectory is done.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from protocols.fields import Record
from rollout.chat.conversation import Conversation
from rollout.chat.errors import ChatError
from rollout.chat.follow import call_id
from rollout.chat.messages import Message
from rollout.environments.base import Context, Environment, EnvironmentFactory, FinalReward, Step, TurnResult
from rollout.environments.calls import Call
from rollout.environments.pool import NOBODY, Owner, Pool
from rollout.tools.parse import Said, read
from rollout.tools.results import LIMIT
from rollout.tools.run import DEADLINE_S, MAX_CALLS, WAIT_S, Problem, Result, Runner
from rollout.tools.tool import Tool, check_function


@dataclass(frozen=True, slots=True)
class Episode:
    """What a reward is made of.

    messages: the whole conversation; an assistant's content is all it said. answer: what the last turn said, without
    its reasoning and calls. results: of all calls, in order. context: metadata, config, seed of the trajectory.
    record: as it will be sent; None before the end.
    """

    messages: Sequence[Message]
    answer: str
    results: Sequence[Result]
    context: Context
    record: Record | None = None


class ToolEnvironment(Environment):
    """Config of a submit, each key optional: tools (names of those to offer), user (what the user says after each
    answer, a list of texts), max_bad_calls (so many bad calls in a row end the trajectory; 0: any number may come).
    """

    tools: Sequence[Callable[..., Any] | Tool] = ()
    """Plain functions of a module run in processes, where they may block, crash and be killed; coroutine functions on
    the worker's loop; methods and closures on threads, which cannot be killed."""
    deadline_s: ClassVar[float] = DEADLINE_S
    """Of one call, from its start."""
    wait_s: ClassVar[float] = WAIT_S
    """Of one call, for a process to be free: then the trajectory fails, and not the call."""
    max_result: ClassVar[int] = LIMIT
    """Characters of what one call returns."""
    max_calls: ClassVar[int] = MAX_CALLS
    """Of one turn."""
    max_bad_calls: ClassVar[int] = 3
    pool: Pool | None = None
    """Set by the worker, as is the next."""
    owner: Owner = NOBODY

    def reward(self, episode: Episode) -> FinalReward | Awaitable[FinalReward]:  # noqa: ARG002
        """`def` (on a thread) or `async def`. None: nobody scored it."""
        return None

    def reply(self, episode: Episode) -> str | Awaitable[str | None] | None:
        """What the user says to an answer; None ends the trajectory. By default: what the submit's config says."""
        user = episode.context.config.get("user") or ()
        return user[self._replies] if self._replies < len(user) else None

    @classmethod
    def chat_roles(cls, config: Mapping[str, Any]) -> tuple[str, ...]:  # type: ignore[override]
        """Raises ChatError where the configuration is wrong."""
        own_words = cls.reply is not ToolEnvironment.reply
        if not own_words:
            _check_texts(config.get("user", ()), "user")
        bad = config.get("max_bad_calls", 0)
        if isinstance(bad, bool) or not isinstance(bad, int) or bad < 0:
            raise ChatError("must be a whole number, 0 or more", "environment.config.max_bad_calls")
        return ("tool", "user") if own_words or config.get("user") else ("tool",)

    @classmethod
    def tool_schemas(cls, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Of the tools on offer, for the template to print. Raises ChatError where the configuration is wrong."""
        known = {} if _is_computed(cls) else by_name(cls.tools)
        return [tool.schema for tool in offered(known, config).values()]

    async def reset(self, context: Context) -> None:
        if context.chat is None:
            raise ChatError("this environment goes on in messages: submit messages", "prompt")
        self._context = context
        self._chat: Conversation = context.chat
        self._thinking = self._chat.form.opens_reasoning()
        self._runner = Runner(
            offered(by_name(self.tools), context.config),
            self.deadline_s,
            self.max_result,
            self.max_calls,
            self.pool,
            self.owner,
            self.wait_s,
        )
        self._most_bad = context.config.get("max_bad_calls", self.max_bad_calls)
        self._bad = 0
        self._replies = 0
        self._results: list[Result] = []
        self._answer = ""

    def progress(self) -> dict[str, Any]:
        """What `go_on` takes, besides the conversation: for a class that has `snapshot` and `restore`."""
        problems = [result.problem for result in self._results]
        return {"answer": self._answer, "replies": self._replies, "problems": problems}

    async def go_on(self, context: Context, progress: Mapping[str, Any]) -> None:
        """In place of `reset`: as if all that was said in the conversation had been said here."""
        await ToolEnvironment.reset(self, context)
        problems: list[Problem | None] = progress["problems"]
        results = [message for message in self._chat.messages if message["role"] == "tool"]
        for message, problem in zip(results[len(results) - len(problems) :], problems, strict=True):
            self._add(Result(message["name"], message["content"], problem))
        self._answer, self._replies = progress["answer"], progress["replies"]

    async def step(self, turn: TurnResult) -> Step:
        said = read(self._chat.text(turn), complete=turn.finish_reason == "stop", thinking=self._thinking)
        self._answer = said.content
        if not said.calls:
            return await self._answered(turn)
        results = await self._runner.run(said.calls)
        for result in results:
            self._add(result)
        messages = [_message(result, i) for i, result in enumerate(results)]
        if self._most_bad and self._bad >= self._most_bad:
            await self._chat.follow(turn)
            return Step(done=True, called=_called(said))
        return await self._chat.follow(turn, *messages, called=_called(said))

    async def finish(self, record: Record) -> FinalReward:
        outcome: FinalReward = await _call(self.reward, self._episode(record))
        return outcome

    def _add(self, result: Result) -> None:
        self._results.append(result)
        self._bad = self._bad + 1 if result.bad_call else 0

    async def _answered(self, turn: TurnResult) -> Step:
        text: str | None = await _call(self.reply, self._episode(None))
        if text is None:
            return await self._chat.follow(turn)
        self._replies += 1
        return await self._chat.follow(turn, {"role": "user", "content": text})

    def _episode(self, record: Record | None) -> Episode:
        return Episode(tuple(self._chat.messages), self._answer, tuple(self._results), self._context, record)


@dataclass(frozen=True, slots=True)
class Placed:
    """Makes environments whose plain functions run in the processes of `pool`, for `owner`."""

    factory: type[ToolEnvironment]
    pool: Pool
    owner: Owner = NOBODY

    def __call__(self) -> ToolEnvironment:
        environment = self.factory()
        environment.pool, environment.owner = self.pool, self.owner
        return environment


def placed(factory: EnvironmentFactory, pool: Pool) -> EnvironmentFactory:
    """Where the factory is a `ToolEnvironment`; another one stays as it is."""
    made: object = factory
    return Placed(made, pool) if isinstance(made, type) and issubclass(made, ToolEnvironment) else factory


def check_tools(factory: object) -> None:
    """Raises ValueError where the class of a `ToolEnvironment` says something else than tools."""
    if isinstance(factory, type) and issubclass(factory, ToolEnvironment) and not _is_computed(factory):
        by_name(factory.tools)


def by_name(tools: Any) -> dict[str, Tool]:
    """Raises ValueError: they are no sequence of functions, or two have one name."""
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ValueError(f"tools is {str(tools)[:64]!r}, not a tuple of functions")
    known: dict[str, Tool] = {}
    for entry in tools:
        tool = entry if isinstance(entry, Tool) else Tool.of(entry)
        check_function(tool.function)
        if tool.name in known:
            raise ValueError(f"two of its tools are called {tool.name!r}")
        known[tool.name] = tool
    return known


def _is_computed(factory: type[ToolEnvironment]) -> bool:
    """Are the tools a property of the instance? Then the class alone does not know them."""
    return isinstance(inspect.getattr_static(factory, "tools"), property | functools.cached_property)


def offered(known: Mapping[str, Tool], config: Mapping[str, Any]) -> dict[str, Tool]:
    """Those that the configuration asks for, or all. Raises ChatError."""
    wanted = config.get("tools", list(known))
    _check_texts(wanted, "tools")
    if (missing := next((name for name in wanted if name not in known), None)) is not None:
        raise ChatError(
            f"{missing!r} is no tool of this environment; known: {', '.join(known)}", "environment.config.tools"
        )
    return {name: known[name] for name in wanted}


def _check_texts(value: Any, name: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ChatError("must be a list of texts", f"environment.config.{name}")


def _message(result: Result, index: int) -> Message:
    return {"role": "tool", "name": result.name, "tool_call_id": call_id(index), "content": result.text}


def _called(said: Said) -> bool:
    return bool(said.calls)


async def _call(function: Callable[[Episode], Any], episode: Episode) -> Any:
    """On the loop or on a thread, as the function is; the defaults need neither."""
    if getattr(function, "__func__", None) in (ToolEnvironment.reward, ToolEnvironment.reply):
        return function(episode)
    return await Call(function, episode).result()
