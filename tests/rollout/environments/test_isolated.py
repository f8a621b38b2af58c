"""Environments in processes: the same guarantees, whatever their code does to its process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from protocols import fields
from rollout.chat.tokenizer import Tokenizer
from rollout.environments.answer import Answer, End
from rollout.environments.base import Context, Rewards
from rollout.environments.guard import Guard, Patience
from rollout.environments.pool import Owner
from rollout.environments.registry import Registry
from tests.rollout.build import run
from tests.rollout.chat.test_tokenizer import byte_level
from tests.rollout.environments import foreign, odd
from tests.rollout.environments.build import TURN, context, draft, guarded
from tests.rollout.workers import soon

PATIENCE = Patience(5.0, 5.0, 1.0)


def with_registry(main: Callable[[Registry], Awaitable[None]], processes: int = 1) -> None:
    names = {name: getattr(odd, name) for name in ("Odd", "Patient", "Telling", "Asking", "Least", "broken")}

    async def body() -> None:
        registry = Registry(names, processes=2 * processes)
        try:
            await main(registry)
        finally:
            await registry.close()

    run(body())


def about(**metadata: Any) -> Callable[[], Context]:
    config = {"folder": metadata.pop("folder", "")}
    return lambda: dataclasses.replace(context(), metadata=metadata, config=config)


def guard(registry: Registry, name: str, patience: Patience = PATIENCE, **budget: Any) -> Guard:
    return guarded(registry.resolve(fields.Environment(name=name)), patience, **budget)


async def play(guard: Guard, make_context: Callable[[], Context]) -> Any:
    """The end, or the reward of the end."""
    result: Any = await guard.open(make_context, ())
    for index in range(3):
        if isinstance(result, End):
            break
        turn = dataclasses.replace(TURN, turn=TURN.turn.model_copy(update={"index": index}))
        result = await guard.step(turn, ())
    if not isinstance(result, End):
        result = await guard.finish(draft(), ())
    await guard.close()
    return result


def test_it_runs_elsewhere_and_everything_crosses() -> None:
    async def main(registry: Registry) -> None:
        played = guard(registry, "Telling")
        answer = await played.open(lambda: dataclasses.replace(context(), config={"x": 7}), ())
        assert isinstance(answer, Answer)
        assert answer.observation is not None
        assert answer.glue is not None
        assert (answer.observation.tolist(), answer.glue.tolist(), answer.max_tokens) == ([3, 2, 1], [1, 2], 3)
        assert (played.fixed_turns, played.ends_when_cut) == (True, False)
        step = await played.step(TURN, ())
        assert isinstance(step, Answer)
        arrays = (step.glue, step.observation, step.opening, step.branch)
        assert [array.tolist() for array in arrays if array is not None] == [[2], [7, 8], [9], [1, 2]]
        assert (step.done, step.reward, step.called, step.max_tokens) == (True, 0.25, True, 4)
        scored = await played.finish(draft(), ())
        assert isinstance(scored, Rewards)
        assert scored.total is None
        assert {"seed": 1.0, "config": 7.0, "len": 0.0}.items() <= scored.parts.items()
        assert scored.parts["pid"] != os.getpid()
        await played.close()

    with_registry(main)


def test_text_is_encoded_there_with_the_checkpoints_tokenizer() -> None:
    tokenizer = Tokenizer(byte_level().to_str().encode())

    async def main(registry: Registry) -> None:
        for _ in range(2):
            played = guard(registry, "Telling")
            answer = await played.open(lambda: dataclasses.replace(context(), tokenizer=tokenizer), ())
            assert isinstance(answer, Answer), answer
            assert answer.observation is not None
            assert answer.observation[::-1].tolist() == tokenizer.encode("hello").tolist()
            await played.close()

    with_registry(main)


@pytest.mark.parametrize("stage", ["reset", "step", "finish"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "ValueError: on purpose"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: "),
        ("kill", r"killed by signal 9 \(Killed\)"),
        ("os._exit", "ended with exit code 4"),
        ("own class", "(returned|is) a Own, not"),
    ],
)
def test_a_failure_names_its_stage_and_costs_its_own_trajectory(stage: str, what: str, message: str) -> None:
    async def main(registry: Registry) -> None:
        end = await play(guard(registry, "Odd"), about(stage=stage, what=what))
        assert isinstance(end, End), end
        assert end.failure is not None
        assert (end.reason, end.failure.stage) == ("env_error", stage)
        with pytest.raises(ValueError, match=message):
            raise ValueError(end.failure.message)
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)

    with_registry(main)


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("none", "step returned None, not a Step"),
        ("nan", "reward is nan"),
        ("bad id", "outside of the vocabulary"),
        ("20 MB", "too large"),
    ],
)
def test_nonsense_is_refused_by_name(what: str, complaint: str) -> None:
    async def main(registry: Registry) -> None:
        end = await play(guard(registry, "Odd"), about(stage="step", what=what))
        assert isinstance(end, End)
        assert end.failure is not None
        assert complaint in end.failure.message

    with_registry(main)


@pytest.mark.parametrize("what", ["hang", "burn", "print"])
def test_a_step_that_does_not_return_costs_its_deadline(what: str) -> None:
    async def main(registry: Registry) -> None:
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)
        played = guard(registry, "Odd", tool_deadline_s=0.5)
        assert not isinstance(await played.open(about(stage="step", what=what), ()), End)
        began = time.monotonic()
        end = await played.step(TURN, ())
        assert time.monotonic() - began < 0.5 + 2.0
        assert isinstance(end, End)
        assert end.reason == "tool_deadline"
        # Python that burns can be interrupted, a system call cannot: the process, and what could score, is gone.
        assert played.scores == (what != "hang")
        await played.close()
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)

    with_registry(main)


def test_a_process_that_dies_takes_its_own_trajectories_with_it_at_once_and_no_others() -> None:
    async def main(registry: Registry) -> None:
        here, there, beside = guard(registry, "Odd"), guard(registry, "Odd"), guard(registry, "Patient")
        assert not isinstance(await here.open(about(stage="step", what="kill"), ()), End)
        assert not isinstance(await there.open(about(), ()), End)
        assert not isinstance(await beside.open(about(stage="step", what="hang"), ()), End)
        waiting = asyncio.ensure_future(beside.step(TURN, ()))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        end = await here.step(TURN, ())
        neighbour = await waiting
        assert time.monotonic() - began < 2.0
        for lost in (end, neighbour):
            assert isinstance(lost, End)
            assert lost.failure is not None
            assert "killed by signal 9" in lost.failure.message
            assert lost.failure.stage == "step"
        assert len(registry._pool.processes) == 1
        answer = await there.step(TURN, ())
        assert isinstance(answer, Answer)
        for each in (here, there, beside):
            await each.close()

    with_registry(main, processes=2)


def test_of_a_shared_process_death_nobody_reads_what_others_printed(caplog: pytest.LogCaptureFixture) -> None:
    """They may be other clients' trajectories. The log has it, and who was alone is told what it printed itself."""

    async def main(registry: Registry) -> None:
        culprit, neighbour = guard(registry, "Odd"), guard(registry, "Odd")
        assert not isinstance(await culprit.open(about(stage="step", what="mutter and kill", turn=1), ()), End)
        assert not isinstance(await neighbour.open(about(says="a secret", stage="step", what="hang", turn=1), ()), End)
        for played in (culprit, neighbour):
            assert isinstance(await played.step(TURN, ()), Answer)
        later = dataclasses.replace(TURN, turn=TURN.turn.model_copy(update={"index": 1}))
        hanging = asyncio.ensure_future(neighbour.step(later, ()))
        await asyncio.sleep(0.05)
        for end in (await culprit.step(later, ()), await hanging):
            assert isinstance(end, End)
            assert end.failure is not None
            assert "killed by signal 9 (Killed); the worker's log has the end of its output" in end.failure.message
            assert "secret" not in end.failure.message
            assert "last words" not in end.failure.message
        logged = [record.getMessage() for record in caplog.records if "which several used" in record.getMessage()]
        assert len(logged) == 1
        assert "a secret" in logged[0]
        assert "last words" in logged[0]
        for played in (culprit, neighbour):
            await played.close()
        # One after the other: each is alone, and what was there before is none of its.
        assert await play(guard(registry, "Odd"), about(says="a secret")) == Rewards(3.0)
        end = await play(guard(registry, "Odd"), about(stage="step", what="mutter and kill"))
        assert isinstance(end, End)
        assert end.failure is not None
        assert end.failure.message.endswith("killed by signal 9 (Killed); the end of its output: last words")

    with_registry(main)


def test_a_hang_that_nobody_set_a_deadline_for_is_an_error_and_its_process_replaced(tmp_path: Path) -> None:
    async def main(registry: Registry) -> None:
        for stage in ("reset", "step", "finish"):
            end = await play(
                guard(registry, "Odd", Patience(0.5, 0.5, 0.5)), about(stage=stage, what="hang", folder=tmp_path)
            )
            assert isinstance(end, End)
            assert end.failure is not None
            assert (end.failure.stage, end.failure.code) == (stage, "timeout")

    with_registry(main)


def test_close_is_called_always_and_a_bad_one_costs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def main(registry: Registry) -> None:
        for metadata in ({}, {"stage": "step", "what": "raise"}, {"stage": "step", "what": "burn"}):
            await play(guard(registry, "Odd", tool_deadline_s=0.5), about(**metadata, folder=str(log)))
        assert log.read_text() == "closed\n" * 3
        for what in ("raise", "hang", "kill"):
            began = time.monotonic()
            assert await play(guard(registry, "Odd"), about(stage="close", what=what)) == Rewards(3.0)
            assert time.monotonic() - began < 5.0
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)

    with_registry(main)


def test_a_stop_gives_the_call_up_at_once() -> None:
    async def main(registry: Registry) -> None:
        played = guard(registry, "Odd")
        assert not isinstance(await played.open(about(stage="step", what="hang"), ()), End)
        stop: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(played.step(TURN, (stop,)))
        await asyncio.sleep(0.05)
        stop.set_result(End("abort_client"))
        assert await waiting == End("abort_client")
        await played.close()
        # Before it was even made.
        played = guard(registry, "Odd")
        assert await played.open(about(), (stop,)) == End("abort_client")
        await played.close()
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)

    with_registry(main)


def test_what_cannot_be_there_says_so() -> None:
    async def main(registry: Registry) -> None:
        end = await play(guard(registry, "Asking"), about())
        assert isinstance(end, End)
        assert end.failure is not None
        assert "cannot ask the trainer" in end.failure.message
        end = await play(guard(registry, "broken"), about())
        assert isinstance(end, End)
        assert end.failure is not None
        assert (end.failure.message, end.failure.stage) == ("OSError: no such game", "reset")
        assert await play(guard(registry, "Least"), about()) == Rewards(None)

    with_registry(main)


def test_many_share_few_processes() -> None:
    async def main(registry: Registry) -> None:
        rewards = await asyncio.gather(*(play(guard(registry, "Odd"), about()) for _ in range(40)))
        assert rewards == [Rewards(3.0)] * 40
        assert len(registry._pool.processes) == 2
        assert all(process.load == 0 for process in registry._pool.processes)

    with_registry(main, processes=2)


@pytest.mark.parametrize("stage", ["reset", "step", "finish", "close"])
def test_many_that_hang_at_once_end_at_their_deadlines_and_leave_nothing_behind(stage: str) -> None:
    patience = Patience(0.5, 0.5, 0.5)

    async def main(registry: Registry) -> None:
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)
        began = time.monotonic()
        hung = [play(guard(registry, "Odd", patience), about(stage=stage, what="hang")) for _ in range(24)]
        ends = await asyncio.gather(*hung)
        assert time.monotonic() - began < 0.5 + 10.0, "not one after the other"
        if stage != "close":
            assert all(isinstance(end, End) and end.reason == "env_error" for end in ends)
        assert all(process.load == 0 for process in registry._pool.processes)
        assert await play(guard(registry, "Odd"), about()) == Rewards(3.0)
        assert len(registry._pool.processes) <= 2

    with_registry(main, processes=2)


def test_environments_and_tools_of_many_clients_have_one_bound_together() -> None:
    async def main(registry: Registry) -> None:
        most = 0.0

        async def watched(work: Awaitable[Any]) -> None:
            nonlocal most
            await work
            most = max(most, registry.stats["processes"])

        tools = registry._tool_pool
        calls = [
            tools.call(foreign.sleep, (0.05,), owner=Owner(session, batch, str(i)))
            for session in "abcdef"
            for batch in "xy"
            for i in range(2)
        ]
        played = [play(guard(registry, "Odd"), about()) for _ in range(12)]
        await asyncio.gather(*map(watched, (*calls, *played)))
        assert most == 4
        assert registry.stats["calls_total"] == 24
        assert registry.stats["no_process_total"] == registry.stats["calls_waiting"] == 0

    with_registry(main, processes=2)


def test_who_comes_while_another_closes_shares_with_that_one_and_not_with_one_at_work() -> None:
    async def main(registry: Registry) -> None:
        here, there = guard(registry, "Odd"), guard(registry, "Odd", Patience(5.0, 5.0, 60.0))
        for opened, plan in ((here, {}), (there, {"stage": "close", "what": "hang"})):
            assert not isinstance(await opened.open(about(**plan), ()), End)
        closing = asyncio.ensure_future(there.close())
        first, second = registry._pool.processes
        await soon(lambda: second.closing == 1)
        third = guard(registry, "Odd")
        assert not isinstance(await third.open(about(), ()), End)
        assert (first.load, second.load) == (1, 2)
        fourth = guard(registry, "Odd")
        assert not isinstance(await fourth.open(about(), ()), End)
        assert (first.load, second.load) == (2, 2), "each has one at work"
        closing.cancel()
        await asyncio.wait((closing,))
        for opened in (here, third, fourth):
            await opened.close()
        await soon(lambda: (first.load, first.closing, second.load, second.closing) == (0, 0, 0, 0))

    with_registry(main, processes=2)


@pytest.mark.parametrize("what", ["close descriptors", "close stdout"])
def test_who_closes_the_standard_streams_leaves_that_to_nobody_who_comes_later(what: str) -> None:
    async def main(registry: Registry) -> None:
        closes, beside = guard(registry, "Odd"), guard(registry, "Odd")
        for opened, plan in ((closes, {"stage": "step", "what": what}), (beside, {})):
            assert not isinstance(await opened.open(about(**plan), ()), End)
        assert isinstance(await closes.step(TURN, ()), Answer)
        (process,) = registry._pool.processes
        await closes.close()
        assert not process.died.done(), "another is still in it"
        await beside.close()
        for _ in range(2):
            assert isinstance(await play(guard(registry, "Odd"), about()), Rewards)
        assert process not in registry._pool.processes
        assert registry.stats["process_deaths_total"] == 1

    with_registry(main)
