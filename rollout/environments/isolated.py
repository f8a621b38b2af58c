"""Environments whose code runs in a process of the pool: a stand-in on the event loop, the instance over there.

What crosses is plain: contexts, turns and records one way, checked answers the other.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from engine.request import IntArray
from protocols.fields import Record
from protocols.requests import Continue
from rollout.environments.base import (
    Context,
    Environment,
    EnvironmentFactory,
    FinalReward,
    Ids,
    Observation,
    Step,
    TextCodec,
    TurnResult,
    is_default,
)
from rollout.environments.checks import (
    check_environment,
    check_final,
    check_nothing,
    check_observation,
    check_snapshot,
    check_step,
)
from rollout.environments.errors import ProcessDied
from rollout.environments.pool import Pool, Shared
from rollout.environments.processes import Process

if TYPE_CHECKING:
    from rollout.chat.conversation import Conversation

T = TypeVar("T")
Kept = tuple[dict[str, Any] | None, tuple[bytes, ...] | None]
"""State of an environment (None: it has none), and what was said in its conversation (None: it cannot be sent)."""

WAIT_S: Final = 60.0
"""How long an environment waits for a process to be up: none does where there is one, for they are shared."""


@dataclass(frozen=True, slots=True)
class Isolated:
    """Makes environments in the pool's processes. factory: importable there by its name."""

    pool: Pool
    factory: EnvironmentFactory

    async def __call__(self) -> Environment:
        return await (await self.prepare())()

    async def prepare(self) -> Callable[[], Awaitable[Environment]]:
        """A process for one environment, started and with its module imported; what is returned has to be called."""
        process = await self.pool.lease(WAIT_S)
        try:
            await process.imports(self.factory)
        except BaseException:
            self.pool.release(process)
            raise

        async def make() -> Environment:
            kept = process.next_kept()
            try:
                await process.run(_make, (self.factory,), keep=kept)
                traits: Traits = await process.run(_traits, (), of=kept)
            except BaseException:
                process.forget(kept)
                self.pool.release(process)
                raise
            return StandIn(self.pool, process, kept, traits)

        return make


@dataclass(frozen=True, slots=True)
class Traits:
    """What the worker has to know of an environment's class."""

    on_length: Literal["end", "continue"]
    fixed_turns: bool
    stateless: bool
    can_snapshot: bool


class StandIn(Environment):
    """Passes each call on to the environment kept as number `kept` in `process`. talks: it has a conversation."""

    def __init__(self, pool: Pool, process: Process, kept: int, traits: Traits) -> None:
        self.on_length = traits.on_length  # type: ignore[misc]
        self.fixed_turns = traits.fixed_turns  # type: ignore[misc]
        self.stateless = traits.stateless  # type: ignore[misc]
        self.can_snapshot = traits.can_snapshot
        self.talks = False
        self._branches = False
        self._pool = pool
        self._process = process
        self._kept = kept
        self._vocab_size = 0

    @property
    def lost(self) -> bool:
        """The process is gone, and the environment with it."""
        return self._process.died.done()

    async def reset(self, context: Context) -> Observation | None:
        return cast(Observation | None, await self._call(_reset, self._sent(context)))

    async def restore(self, context: Context, state: Mapping[str, Any]) -> None:
        await self._call(_restore, self._sent(context), dict(state))

    async def kept(self, since: int) -> Kept:
        """See `Guard.kept`."""
        return cast(Kept, await self._call(_kept, since)) if self.talks or not self.stateless else (None, ())

    async def step(self, turn: TurnResult) -> Step:
        if not self._branches:
            turn = dataclasses.replace(turn, before=turn.before[:0])
        return cast(Step, await self._call(_step, turn, self._vocab_size))

    async def finish(self, record: Record) -> FinalReward:
        return cast(FinalReward, await self._call(_finish, record))

    async def close(self) -> None:
        self._process.closing += 1
        try:
            if not self.lost:
                await self._call(_close)
        except ProcessDied:
            pass
        finally:
            self._process.forget(self._kept)
            self._process.closing -= 1
            self._pool.release(self._process)

    def _sent(self, context: Context) -> Context:
        self._vocab_size = context.vocab_size
        self.talks = context.chat is not None
        self._branches = context.chat is not None and context.chat.may_branch
        codec = None if context.tokenizer is None else Codec(self._pool.share(context.tokenizer))
        chat = None if context.chat is None else context.chat.sent(self._pool.share)
        return dataclasses.replace(context, ask=_cannot_ask, tokenizer=codec, chat=chat)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._process.run(function, args, of=self._kept)


@dataclass(frozen=True, slots=True)
class Codec:
    """A `TextCodec` that is loaded in the process that first needs it."""

    shared: Shared

    def encode(self, text: str) -> IntArray:
        return self._codec.encode(text)

    def decode(self, ids: Ids) -> str:
        return self._codec.decode(ids)

    def special(self, token: str) -> int:
        return self._codec.special(token)

    @property
    def _codec(self) -> TextCodec:
        return cast(TextCodec, self.shared.get())


def can_snapshot(made: Environment | type[Environment]) -> bool:
    if isinstance(made, StandIn):
        return made.can_snapshot
    return not any(is_default(made, method) for method in ("snapshot", "restore"))


async def _cannot_ask(_: TurnResult) -> Continue:
    raise RuntimeError("an environment in a process of its own cannot ask the trainer")


# Over there.


@dataclass(slots=True)
class _Hosted:
    environment: Environment
    chat: Conversation | None = None


def _make(factory: EnvironmentFactory) -> _Hosted | Awaitable[_Hosted]:
    return _then(factory(), lambda made: _Hosted(check_environment(made)))


def _traits(hosted: _Hosted) -> Traits:
    made = hosted.environment
    return Traits(made.on_length, bool(made.fixed_turns), bool(made.stateless), can_snapshot(made))


def _reset(hosted: _Hosted, context: Context) -> Any:
    def plain(returned: Any) -> Observation:
        answer = check_observation(returned, context.vocab_size)
        return Observation(answer.observation, answer.glue, answer.max_tokens)

    hosted.chat = context.chat
    return _then(hosted.environment.reset(context), plain)


def _restore(hosted: _Hosted, context: Context, state: Mapping[str, Any]) -> Any:
    hosted.chat = context.chat
    return _then(hosted.environment.restore(context, state), check_nothing)


def _kept(hosted: _Hosted, since: int) -> Any:
    def plain(returned: Any) -> Kept:
        state = None if hosted.environment.stateless else check_snapshot(returned)
        return state, () if hosted.chat is None else hosted.chat.said(since)

    return _then(None if hosted.environment.stateless else hosted.environment.snapshot(), plain)


def _step(hosted: _Hosted, turn: TurnResult, vocab_size: int) -> Any:
    def plain(returned: Any) -> Step:
        answer = check_step(returned, vocab_size)
        return Step(**{field.name: getattr(answer, field.name) for field in dataclasses.fields(Step)})

    return _then(hosted.environment.step(turn), plain)


def _finish(hosted: _Hosted, record: Record) -> Any:
    return _then(hosted.environment.finish(record), check_final)


def _close(hosted: _Hosted) -> Any:
    return _then(hosted.environment.close(), check_nothing)


def _then(returned: Any, check: Callable[[Any], T]) -> T | Awaitable[T]:
    """Of a plain method now, of an asynchronous one when it has returned."""
    if not inspect.isawaitable(returned):
        return check(returned)

    async def later() -> T:
        return check(await returned)

    return later()
