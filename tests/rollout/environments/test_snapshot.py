"""An environment that goes on elsewhere: from a snapshot, or from nothing where it has no state."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from protocols import fields
from rollout.environments.answer import Answer, End
from rollout.environments.base import Rewards
from rollout.environments.guard import Guard
from rollout.environments.isolated import StandIn
from rollout.environments.registry import Registry
from tests.rollout.build import run, script
from tests.rollout.environments import odd
from tests.rollout.environments.build import TURN, context, draft, guarded

NAMES = ("Odd", "Saved", "SavedHere", "BadlySaved")


def with_registry(main: Callable[[Registry], Awaitable[None]]) -> None:
    async def body() -> None:
        registry = Registry({name: getattr(odd, name) for name in NAMES}, processes=4)
        try:
            await main(registry)
        finally:
            await registry.close()

    run(body())


def guard(registry: Registry, name: str) -> Guard:
    return guarded(registry.resolve(fields.Environment(name=name)))


async def added(guard: Guard) -> Any:
    answer = await guard.step(TURN, ())
    assert isinstance(answer, Answer), answer
    assert answer.observation is not None
    return answer.observation.tolist()


@pytest.mark.parametrize("name", ["Saved", "SavedHere"])
def test_it_goes_on_from_where_it_was_and_the_first_one_too(name: str) -> None:
    async def main(registry: Registry) -> None:
        first, second = guard(registry, name), guard(registry, name)
        assert not first.resumable
        await first.open(context, ())
        assert first.resumable
        assert await added(first) == [15]
        kept = await first.kept(0, ())
        assert kept == ({"all": 15}, ())
        assert not isinstance(kept, End)
        state, _ = kept
        assert await added(first) == [30]
        assert state == {"all": 15}, "a copy"
        assert isinstance(state, dict)
        assert await second.reopen(context, state, ()) is None
        assert await added(second) == [30]
        assert second.scores
        assert await second.finish(draft(), ()) == Rewards(30.0)
        for each in (first, second):
            await each.close()

    with_registry(main)


class Large(Mapping[str, Any]):
    """A state that takes its time to be copied: until the event loop has run."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __getitem__(self, key: str) -> Any:
        return {"a": 1}[key]

    def __iter__(self) -> Iterator[str]:
        assert self.release.wait(5), "the loop was held up"
        return iter(("a",))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("kind", ["def", "async def", "def that returns a coroutine"])
def test_a_large_state_is_copied_beside_the_loop(kind: str) -> None:
    large = Large()

    async def later(_: Any) -> Large:
        return large

    snapshots = {"def": lambda _: large, "async def": later, "def that returns a coroutine": lambda made: later(made)}
    holding = type("Holding", (odd.SavedHere,), {"snapshot": snapshots[kind]})

    async def main() -> None:
        held = guarded(holding)
        await held.open(context, ())
        asyncio.get_running_loop().call_later(0.05, large.release.set)
        assert await held.kept(0, ()) == ({"a": 1}, ())

    run(main())


def test_what_has_no_state_needs_no_snapshot() -> None:
    async def main(registry: Registry) -> None:
        for environment in (script((30,), (31,)), fields.Environment(name="remote")):
            first = guarded(registry.resolve(environment))
            await first.open(context, ())
            assert first.resumable
            assert await first.kept(0, ()) == (None, ())
            assert await guarded(registry.resolve(environment)).reopen(context, None, ()) is None

    with_registry(main)


def test_what_is_kept_of_one_in_a_process_takes_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    call = StandIn._call

    async def counted(self: StandIn, function: Any, *args: Any) -> Any:
        calls.append(function.__name__)
        return await call(self, function, *args)

    async def main(registry: Registry) -> None:
        first = guard(registry, "Saved")
        await first.open(context, ())
        monkeypatch.setattr(StandIn, "_call", counted)
        assert await first.kept(0, ()) == ({"all": 0}, ())
        assert calls == ["_kept"]
        await first.close()

    with_registry(main)


def test_what_saves_nothing_cannot_go_on() -> None:
    async def main(registry: Registry) -> None:
        first = guard(registry, "Odd")
        await first.open(context, ())
        assert not first.resumable
        await first.close()

    with_registry(main)


def test_a_bad_snapshot_or_restore_is_an_error_of_its_stage() -> None:
    async def main(registry: Registry) -> None:
        first = guard(registry, "BadlySaved")
        await first.open(context, ())
        for end, stage, message in (
            (await first.kept(0, ()), "snapshot", "snapshot returned a BadlySaved, not a mapping"),
            (await guard(registry, "BadlySaved").reopen(context, {"a": 1}, ()), "reset", "cannot read {'a': 1}"),
        ):
            assert isinstance(end, End)
            assert end.failure is not None
            assert (end.reason, end.failure.stage) == ("env_error", stage)
            assert message in end.failure.message

    with_registry(main)
