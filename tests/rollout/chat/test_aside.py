"""Rendering beside the loop: bounded, interrupted, and in nobody's way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from protocols.fields import Record
from rollout.chat import aside
from rollout.chat.aside import PLACES, THREADS, Aside
from rollout.client import RolloutClient
from rollout.environments.base import Context, Environment, TurnResult
from rollout.environments.line import NOBODY, Owner
from rollout.tools.environment import ToolEnvironment
from tests.rollout.chat.test_wire import Chatty, only, served
from tests.rollout.chat.tiny import THINKING, chat
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.tools.play import play, run
from tests.rollout.workers import eventually, soon, worker

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SLOW_WHEN_SAID = (
    "{% for message in messages %}{% if 'turn 0' in message.content %}" + ENDLESS + "{% endif %}{% endfor %}" + THINKING
)
"""Passes at the submit, and does not come to an end when the conversation goes on."""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "environment"]


def for_ever() -> None:
    while True:
        pass


def test_it_returns_or_raises_what_the_function_does_and_the_loop_goes_on() -> None:
    async def body() -> None:
        here, loop, release = Aside(), asyncio.get_running_loop(), threading.Event()

        def work(value: int) -> tuple[int, str]:
            loop.call_soon_threadsafe(release.set)  # only a loop that runs can let it go on
            assert release.wait(10)
            return value, threading.current_thread().name

        assert await here.run(NOBODY, work, 3) == (3, "environment")
        with pytest.raises(ZeroDivisionError):
            await here.run(NOBODY, divmod, 1, 0)

    run(body())


def test_what_takes_too_long_or_is_given_up_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        monkeypatch.setattr(aside, "RENDER_S", 0.05)
        with pytest.raises(TimeoutError):
            await Aside().run(NOBODY, for_ever)
        monkeypatch.setattr(aside, "RENDER_S", 60.0)
        given_up = asyncio.ensure_future(Aside().run(NOBODY, for_ever))
        await asyncio.sleep(0)
        eventually(lambda: bool(threads()))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up

    run(body())
    eventually(lambda: not threads())


def test_few_are_at_it_at_once_and_one_that_does_not_end_gives_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "QUICK_S", 0.05)
    most = now = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1

    async def body() -> None:
        here = Aside()
        await asyncio.gather(*(here.run(NOBODY, work) for _ in range(20)))
        assert most == PLACES
        stuck = threading.Event()
        held = [asyncio.ensure_future(here.run(NOBODY, stuck.wait)) for _ in range(PLACES)]
        await here.run(NOBODY, work)
        assert not any(task.done() for task in held)
        stuck.set()
        assert await asyncio.gather(*held) == [True] * PLACES

    run(body())


def test_the_wait_for_a_place_is_no_part_of_the_time_that_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand turns end at once: the last waits long, and takes no longer than the first."""
    monkeypatch.setattr(aside, "RENDER_S", 0.25)

    async def body() -> None:
        here, began = Aside(), time.monotonic()
        await asyncio.gather(*(here.run(NOBODY, time.sleep, 0.05) for _ in range(24)))
        assert time.monotonic() - began > 2 * aside.RENDER_S

    run(body())


def test_a_wait_for_a_place_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "QUICK_S", 60.0)

    async def body() -> None:
        here, stuck = Aside(), threading.Event()
        held = [asyncio.ensure_future(here.run(NOBODY, stuck.wait)) for _ in range(PLACES)]
        await soon(lambda: len(threads()) == PLACES)
        begun: list[int] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await here.run(NOBODY, begun.append, 1)
        stuck.set()
        await asyncio.gather(*held)
        await here.run(NOBODY, begun.append, 2)
        assert begun == [2]

    run(body())


def test_many_that_do_not_end_are_no_more_threads_than_the_loop_can_bear_and_wait_for_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aside, "QUICK_S", 0.001)

    async def body() -> None:
        here, stuck = Aside(), threading.Event()
        theirs = [Owner("a", trajectory=str(i)) for i in range(2 * THREADS)]
        held = [asyncio.ensure_future(here.run(owner, stuck.wait)) for owner in theirs]
        await soon(lambda: len(threads()) == THREADS - 1)
        for _ in range(3):
            assert await here.run(Owner("b"), len, "another's") == len("another's")
        assert here._line.holds("a") == THREADS - 1
        others = [asyncio.ensure_future(here.run(Owner(session), stuck.wait)) for session in "bc"]
        await soon(lambda: here._free == 0)
        assert len(threads()) <= THREADS + 1, "one may be about to end"
        assert (here._line.holds("b"), here._line.holds("c")) == (1, 0)
        others[0].cancel()
        await soon(lambda: here._line.holds("c") == 1)
        for task in held[:THREADS]:
            task.cancel()
        stuck.set()
        assert await asyncio.gather(*held[THREADS:], others[1]) == [True] * (THREADS + 1)
        assert here._free == THREADS
        assert not len(here._line)

    run(body())
    eventually(lambda: not threads())


# From turn to turn.


class User(ToolEnvironment):
    """A user who says "turn 0" to an answer."""

    def reply(self, episode: Any) -> str:  # noqa: ARG002
        return "turn 0"

    def reward(self, episode: Any) -> float:  # noqa: ARG002
        return 0.5


class Own(Environment):
    """As somebody may write it, on a thread."""

    chat_roles = ("user",)

    def reset(self, context: Context) -> None:
        self.chat = context.chat

    def step(self, turn: TurnResult) -> Any:
        assert self.chat is not None
        return self.chat.follow(turn, {"role": "user", "content": "turn 0"})


async def ticking(playing: Callable[[], Any]) -> tuple[Record, float]:
    """The record, and the longest time for which the loop did not run."""
    longest, done = 0.0, False

    async def tick() -> None:
        nonlocal longest
        while not done:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            longest = max(longest, time.monotonic() - began)

    ticks = asyncio.ensure_future(tick())
    record = await playing()
    done = True
    await ticks
    return record, longest


@pytest.mark.parametrize("make", [User, Own])
@pytest.mark.parametrize(
    ("budget", "reason", "limit"),
    [
        ({"trajectory_deadline_s": 0.2}, "trajectory_deadline", "trajectory_deadline_s"),
        ({"tool_deadline_s": 0.2, "trajectory_deadline_s": 60.0}, "tool_deadline", "tool_deadline_s"),
    ],
)
def test_a_template_that_does_not_end_between_turns_is_bounded_by_the_deadlines(
    make: Any, budget: dict[str, Any], reason: str, limit: str
) -> None:
    record, longest = run(ticking(lambda: play(make, "hello", jinja=SLOW_WHEN_SAID, budget=budget)))
    assert (record.status, record.finish_reason) == ("truncated", reason)
    assert record.truncation is not None
    assert (record.truncation.limit, record.truncation.value) == (limit, 0.2)
    assert record.reward == (0.5 if make is User else None)
    assert record.segments[0].loss_mask.sum() == record.segments[0].turns[0].length > 0
    assert longest < 1.0, "the loop was held up"
    eventually(lambda: not threads())


def test_without_a_deadline_it_is_an_error_that_names_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "RENDER_S", 0.3)
    record = run(play(User, "hello", jinja=SLOW_WHEN_SAID))
    assert (record.status, record.finish_reason) == ("failed", "env_error")
    assert record.error is not None
    assert record.error.stage == "step"
    assert "the chat template did not come to an end" in record.error.message
    eventually(lambda: not threads())


class Apart(Chatty):
    isolation = "process"


def test_others_are_served_meanwhile_and_a_process_is_not_lost() -> None:
    what = served(chat(SLOW_WHEN_SAID), apart=Apart)
    with worker(TimedEngine(), what=what) as thread, RolloutClient(thread.address) as client:
        talk: dict[str, Any] = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "on_length": "continue",
        }
        slow = [client.group(environment=name, tool_deadline_s=2.0, n=3, **talk) for name in ("chatty", "apart")]
        batch = client.submit(slow)
        with RolloutClient(thread.address) as other:
            waits = []
            for _ in range(5):
                began = time.monotonic()
                assert only(other, messages=talk["messages"]).ok
                waits.append(time.monotonic() - began)
        ended = list(batch)
        environments = client.status().environments
    assert environments["processes"] > 0
    assert environments["process_deaths_total"] == 0
    assert [t.finish_reason for t in ended] == ["tool_deadline"] * 6
    assert all(len(t.turns) == 1 for t in ended)
    assert max(waits) < 1.8
    eventually(lambda: not threads())
