# ruff: noqa: ARG002
"""An environment behind its guard: whatever plug-in code does comes back as a value, in bounded time."""

from __future__ import annotations

import asyncio
import numbers
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from protocols.fields import Record
from rollout.environments import bounded
from rollout.environments.answer import Answer, End
from rollout.environments.base import Context, Environment, Observation, Rewards, Step, TurnResult, is_default
from rollout.environments.guard import Patience
from tests.rollout.build import run
from tests.rollout.environments.build import TURN, Fake, context, draft, for_ever, guarded, opened, raise_


def test_a_default_is_found_without_running_code_of_the_environment() -> None:
    class Plain(Environment):
        def step(self, turn: TurnResult) -> Step:
            return Step(done=True)

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class Closes(Plain):
        def close(self) -> None: ...

    assert is_default(Plain, "close")
    assert is_default(Plain(), "close")
    assert not is_default(Closes, "close")
    assert not is_default(Closes(), "close")
    assert is_default(Closes(), "reset")
    own = Fake()
    vars(own)["reset"] = lambda _context: None
    assert not is_default(own, "reset")


def test_an_environment_is_made_reset_stepped_scored_and_closed() -> None:
    async def main() -> None:
        fake = Fake(
            reset=lambda _c: Observation(ids=[4]), step=lambda _t: Step(done=True), finish=lambda _r: {"a": 1.0}
        )
        guard = guarded(lambda: fake)
        answer = await guard.open(context, ())
        assert isinstance(answer, Answer)
        assert answer.observation is not None
        assert answer.observation.tolist() == [4]
        assert guard.ends_when_cut
        assert not guard.fixed_turns
        assert await guard.step(TURN, ()) == Answer(done=True)
        assert guard.scores
        assert await guard.finish(draft(), ()) == Rewards(1.0, {"a": 1.0})
        await guard.close()
        assert fake.calls == ["reset", "step", "finish", "close"]

    run(main())


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        SystemExit(1),
        KeyboardInterrupt("boom"),
        asyncio.CancelledError("boom"),
        BaseException("boom"),
    ],
)
@pytest.mark.parametrize("stage", ["make", "reset", "step", "finish"])
def test_an_error_names_its_stage_and_itself(stage: str, error: BaseException) -> None:
    async def main() -> End:
        make = raise_(error) if stage == "make" else lambda: Fake(**{stage: raise_(error)})
        guard = guarded(make)
        result: Any = await guard.open(context, ())
        if stage == "step":
            result = await guard.step(TURN, ())
        elif stage == "finish":
            result = await guard.finish(draft(), ())
        await guard.close()
        return result

    end = run(main())
    assert isinstance(end, End)
    assert end.failure is not None
    assert end.reason == "env_error"
    assert end.failure.stage == ("reset" if stage == "make" else stage)
    assert type(error).__name__ in end.failure.message
    assert end.failure.scope == "trajectory"


def test_an_error_that_cannot_be_printed_is_still_reported_and_a_long_one_is_cut() -> None:
    class Unprintable(Exception):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __str__(self) -> str:
            raise self.error

    async def main(error: Exception) -> End:
        guard = await opened(lambda: Fake(step=raise_(error)))
        end = await guard.step(TURN, ())
        assert isinstance(end, End)
        return end

    for error in (RuntimeError("no"), SystemExit(3)):
        end = run(main(Unprintable(error)))
        assert end.failure.message == "Unprintable (it cannot be printed)"
    end = run(main(ValueError("x" * 2_000_000)))
    assert len(end.failure.message) == bounded.MAX_MESSAGE


def test_what_raises_only_when_it_is_looked_at_is_an_error_too() -> None:
    @numbers.Real.register
    class Score:
        def __float__(self) -> float:
            raise SystemExit(4)

    class Hidden(Fake):
        @property
        def step(self) -> Any:  # type: ignore[override]
            raise SystemExit(5)

    async def main(make: Callable[[], Environment]) -> str:
        end = await (await opened(make)).step(TURN, ())
        assert isinstance(end, End)
        assert end.failure is not None
        return end.failure.message

    assert run(main(lambda: Fake(step=lambda _t: Step(reward=Score())))) == "SystemExit: 4"  # type: ignore[arg-type]
    assert run(main(Hidden)) == "SystemExit: 5"


class Undecided(Fake):
    on_length = "go on"


@pytest.mark.parametrize("made", [None, 3, Environment, object(), Undecided()])
def test_a_factory_that_makes_no_environment_is_an_error_of_reset(made: Any) -> None:
    async def main() -> None:
        guard = guarded(lambda: made)
        end = await guard.open(context, ())
        assert isinstance(end, End)
        assert end.failure is not None
        assert (end.reason, end.failure.stage) == ("env_error", "reset")
        assert not guard.scores
        await guard.close()

    run(main())


@pytest.mark.parametrize("returned", [None, 5, "done", Step(reward=float("nan"))])
def test_nonsense_is_an_error_of_its_stage(returned: Any) -> None:
    async def main() -> None:
        guard = await opened(lambda: Fake(step=lambda _t: returned))
        end = await guard.step(TURN, ())
        assert isinstance(end, End)
        assert end.failure is not None
        assert (end.reason, end.failure.stage, end.failure.code) == ("env_error", "step", "internal")

    run(main())


@pytest.mark.parametrize("outcome", [Step(done=True), ValueError("boom"), SystemExit(1), None])
def test_an_immediate_step_is_called_where_it_is_and_comes_back_as_a_value_too(outcome: Any) -> None:
    class Quick(Environment):
        immediate = True

        def step(self, turn: TurnResult) -> Step:
            called.append((threading.current_thread(), asyncio.current_task()))
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome  # type: ignore[no-any-return]

    called: list[Any] = []

    async def main() -> None:
        guard = await opened(Quick)
        found = await guard.step(TURN, ())
        assert called == [(threading.current_thread(), asyncio.current_task())]
        if isinstance(outcome, Step):
            assert found == Answer(done=True)
            return
        assert isinstance(found, End)
        assert found.failure is not None
        assert (found.reason, found.failure.stage) == ("env_error", "step")
        assert ("step returned None" if outcome is None else type(outcome).__name__) in found.failure.message

    run(main())


def test_a_tool_that_never_answers_costs_its_deadline_and_the_environment_can_still_score() -> None:
    async def main() -> None:
        fake = Fake(step=for_ever, finish=lambda _r: 0.25)
        guard = await opened(lambda: fake, tool_deadline_s=0.05)
        end = await guard.step(TURN, ())
        assert isinstance(end, End)
        assert end.truncation is not None
        assert (end.reason, end.truncation.limit, end.truncation.value) == ("tool_deadline", "tool_deadline_s", 0.05)
        assert await guard.finish(draft(), ()) == Rewards(0.25)
        await guard.close()
        assert fake.calls == ["reset", "step", "finish", "close"]

    run(main())


@pytest.mark.parametrize("stage", ["make", "reset", "step", "finish"])
def test_a_hang_that_nobody_set_a_deadline_for_is_an_error(stage: str) -> None:
    async def main() -> None:
        make = for_ever if stage == "make" else lambda: Fake(**{stage: for_ever})
        guard = guarded(make, Patience(0.05, 0.05, 0.05))
        result: Any = await guard.open(context, ())
        if stage == "step":
            result = await guard.step(TURN, ())
        elif stage == "finish":
            result = await guard.finish(draft(), ())
        assert isinstance(result, End)
        assert result.failure is not None
        assert (result.reason, result.failure.code) == ("env_error", "timeout")
        assert result.failure.stage == ("reset" if stage == "make" else stage)
        await guard.close()

    run(main())


def test_what_was_never_reset_is_closed_but_not_scored() -> None:
    async def main() -> None:
        stop: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        begun = asyncio.Event()

        async def hang(_context: Context) -> None:
            begun.set()
            await for_ever()

        fake = Fake(reset=hang)
        guard = guarded(lambda: fake)
        opening = asyncio.ensure_future(guard.open(context, (stop,)))
        await begun.wait()
        stop.set_result(End("trajectory_deadline"))
        assert await opening == End("trajectory_deadline")
        assert not guard.scores
        await guard.close()
        assert fake.calls == ["reset", "close"]

    run(main())


def test_a_close_that_hangs_or_raises_costs_its_deadline_only() -> None:
    async def main() -> None:
        for close in (for_ever, raise_(SystemExit(1))):
            guard = await opened(lambda close=close: Fake(close=close), Patience(5, 5, 0.05))
            await guard.close()

    run(main())


def test_a_blocking_step_is_left_behind_and_nobody_else_touches_its_environment() -> None:
    release = threading.Event()

    class Blocking(Environment):
        finished = False
        closed = False

        def step(self, turn: TurnResult) -> Step:
            release.wait(20)
            return Step()

        def finish(self, record: Record) -> float:
            Blocking.finished = True
            return 1.0

        def close(self) -> None:
            Blocking.closed = True
            release.set()

    async def main() -> None:
        guard = await opened(Blocking, tool_deadline_s=0.05)
        end = await guard.step(TURN, ())
        assert isinstance(end, End)
        assert end.reason == "tool_deadline"
        assert not guard.scores
        await guard.close()

    run(main())
    assert Blocking.closed
    assert not Blocking.finished


def test_a_step_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "UNWIND_S", 0.05)

    async def main() -> None:
        over = asyncio.Event()

        async def stubborn(*_args: Any) -> Step:
            while not over.is_set():
                try:
                    await over.wait()
                except asyncio.CancelledError:
                    continue
            return Step()

        guard = await opened(lambda: Fake(step=stubborn), tool_deadline_s=0.05)
        end = await guard.step(TURN, ())
        assert isinstance(end, End)
        assert end.reason == "tool_deadline"
        assert not guard.scores
        over.set()
        await guard.close()

    run(main())


def test_a_stop_ends_the_wait_with_its_own_reason() -> None:
    async def main() -> None:
        begun = asyncio.Event()

        async def hang(_turn: TurnResult) -> None:
            begun.set()
            await for_ever()

        guard = await opened(lambda: Fake(step=hang))
        stop: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(guard.step(TURN, (stop,)))
        await begun.wait()
        stop.set_result(End("abort_client"))
        assert await waiting == End("abort_client")
        assert await guard.step(TURN, (stop,)) == End("abort_client")

    run(main())


def test_the_budget_decides_what_a_cut_turn_means_and_else_the_environment() -> None:
    class GoesOn(Fake):
        on_length = "continue"

    async def main() -> None:
        assert not (await opened(GoesOn)).ends_when_cut
        assert (await opened(GoesOn, on_length="end")).ends_when_cut
        assert (await opened(Fake)).ends_when_cut
        assert not (await opened(Fake, on_length="continue")).ends_when_cut

    run(main())


def test_defaults_are_not_called() -> None:
    class Least(Environment):
        def step(self, turn: TurnResult) -> Step:
            return Step(done=True)

    async def main() -> None:
        guard = guarded(Least)
        threads = threading.active_count()

        def never() -> Context:
            raise AssertionError("a context was made for nobody")

        assert await guard.open(never, ()) == Answer()
        assert not guard.scores
        await guard.close()
        assert threading.active_count() <= threads + 1

    run(main())


def test_a_slow_environment_does_not_slow_its_neighbours() -> None:
    class Slow(Environment):
        def step(self, turn: TurnResult) -> Step:
            time.sleep(0.2)
            return Step(done=True)

    async def main() -> None:
        guards = [await opened(Slow) for _ in range(40)]
        began = time.monotonic()
        await asyncio.gather(*(guard.step(TURN, ()) for guard in guards))
        assert time.monotonic() - began < 4.0, "40 waits of 0.2 s ran one after the other"

    run(main())
