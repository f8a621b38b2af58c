"""Calls into environment code: values out, the loop never held up and never ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rollout.environments.calls import Call, Interrupted, Raised, Returned, _Interruption
from tests.rollout.build import run


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_whatever_is_raised_comes_back_as_a_value(error: BaseException, asynchronous: bool) -> None:
    async def later() -> None:
        raise error

    def now() -> None:
        raise error

    async def main() -> None:
        outcome = await Call(later if asynchronous else now).task
        assert outcome == Raised(error)

    run(main())


def test_a_plain_function_does_not_hold_up_the_loop() -> None:
    release = threading.Event()

    def block() -> str:
        assert release.wait(20)
        return threading.current_thread().name

    async def main() -> None:
        calls = [Call(block) for _ in range(50)]
        ticks = 0
        while ticks < 100:
            await asyncio.sleep(0)
            ticks += 1
        assert all(call.running for call in calls)
        release.set()
        for call in calls:
            assert await call.task == Returned("environment")

    run(main())


def test_a_plain_function_may_return_an_awaitable() -> None:
    async def inner() -> int:
        return 5

    async def main() -> None:
        assert await Call(lambda: inner()).task == Returned(5)

    run(main())


def test_a_thread_that_outlives_its_loop_is_harmless() -> None:
    release = threading.Event()

    async def main() -> Call:
        call = Call(release.wait, 20)
        await asyncio.sleep(0)
        call.task.cancel()
        await call.task
        assert call.running
        return call

    call = run(main())
    release.set()
    assert call._thread is not None
    call._thread.join(20)
    assert not call.running


def test_an_interruption_comes_in_the_call_or_not_at_all() -> None:
    """Whenever it is asked for, also when the call begins or ends: every task ends, and no thread dies of it."""

    def count(to: int) -> None:
        for _ in range(to):
            pass

    async def main() -> None:
        for spins in range(400):
            call = Call(count, 50 * spins)
            for _ in range(spins % 4):
                await asyncio.sleep(0)
            call.interrupt()
            call.interrupt()
            done, _ = await asyncio.wait({call.task}, timeout=10)
            assert done
            if not call.task.cancelled():
                outcome = call.task.result()
                assert isinstance(outcome, Returned) or isinstance(outcome.error, Interrupted | asyncio.CancelledError)

    asyncio.run(main())


def test_one_that_was_asked_for_before_the_call_is_raised_at_its_begin() -> None:
    interruption = _Interruption()
    interruption.ask()
    with pytest.raises(Interrupted):
        interruption.begin()
    interruption.end()
    interruption.ask()
    for _ in range(1000):
        pass  # it would come here
