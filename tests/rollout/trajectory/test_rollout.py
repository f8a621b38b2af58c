"""Whole trajectories: whatever the engine, the environment or the trainer does becomes one record."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handles.thread import ThreadEngine
from engine.request import Completion, Failure, Request
from engine.request import Times as EngineTimes
from protocols import fields
from protocols.errors import BadRequest, PrefixMismatch
from protocols.fields import SOURCE_SAMPLED, Group, Record, Times
from protocols.replies import TurnDone
from protocols.requests import Continue
from rollout.environments.base import Context, Environment, Observation, Step, TurnResult
from rollout.environments.guard import Patience
from rollout.environments.registry import Registry
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests.fake_runner import FakeRunner, FakeWeights
from tests.rollout.build import EOS, MODEL, group, ids, run, script, spec
from tests.rollout.stub_engine import StubEngine, completed, refused

REGISTRY = Registry({})
REMOTE = fields.Environment(name="remote")


def held(_request: Request) -> None:
    return None


class Play:
    """One rollout on a stub engine."""

    def __init__(self, stub: StubEngine, engine: AsyncEngine, group: Group, make: Any = None, **changes: Any) -> None:
        self.stub = stub
        self.turns: asyncio.Queue[TurnDone] = asyncio.Queue()
        self.rollout = Rollout(
            spec(group, **changes),
            engine=engine,
            environment=make or REGISTRY.resolve(group.environment),
            model=MODEL,
            on_turn=self.turns.put_nowait,
            patience=Patience(5.0, 5.0, 0.5),
        )
        self.record = asyncio.ensure_future(self.rollout.run())


async def play(stub: StubEngine, group: Group, make: Any = None, **changes: Any) -> Play:
    engine = AsyncEngine(stub)
    await engine.start()
    return Play(stub, engine, group, make, **changes)


def record_of(stub: StubEngine, group: Group, make: Any = None, **changes: Any) -> Record:
    async def main() -> Record:
        return await (await play(stub, group, make, **changes)).record

    result: Record = run(main())
    check(result)
    return result


def check(record: Record) -> None:
    """What holds for every record."""
    for segment in record.segments:
        assert (segment.loss_mask <= (segment.source == SOURCE_SAMPLED)).all()
        assert not segment.logprobs[segment.source != SOURCE_SAMPLED].any()
        assert len(segment.token_ids) <= MODEL.max_context
    assert (record.error is None) == (record.status != "failed")
    total = sum(record.times.model_dump().values())
    assert total == pytest.approx(record.wall_s, rel=0.01, abs=1e-9)


def replies(*scripted: tuple[tuple[int, ...], str]) -> Callable[[Request], Completion]:
    turns = iter(scripted)

    def reply(request: Request) -> Completion:
        sampled, reason = next(turns)
        return completed(request, sampled, reason)  # type: ignore[arg-type]

    return reply


# Scripted.


def test_a_script_from_prompt_to_record() -> None:
    stub = StubEngine(replies(((20, EOS), "stop"), ((21, 22), "length"), ((23, EOS), "stop")))
    result = record_of(stub, group(sampling={"max_tokens": 2}, environment=script((30,), (31, 32))))
    assert (result.status, result.finish_reason, result.truncation, result.reward) == ("completed", "stop", None, None)
    (segment,) = result.segments
    assert segment.token_ids.tolist() == [10, 11, 12, 20, EOS, 90, 30, 21, 22, 90, 31, 32, 23, EOS]
    assert [turn.finish_reason for turn in segment.turns] == ["stop", "length", "stop"]
    requests = [stub.submitted.get_nowait() for _ in range(3)]
    assert [request.id for request in requests] == ["s/t/0", "s/t/1", "s/t/2"]
    assert requests[2].token_ids.tolist() == segment.token_ids.tolist()[:12]


@pytest.mark.parametrize(
    ("reason", "budget", "expected"),
    [
        ("stop", {}, ("completed", "stop", None)),
        ("length", {}, ("truncated", "length", "max_tokens")),
        ("length", {"on_length": "end"}, ("truncated", "length", "max_tokens")),
        ("stop", {"max_turns": 1}, ("completed", "stop", None)),
    ],
)
def test_a_single_turn_ends_the_way_it_ended(reason: str, budget: dict[str, Any], expected: tuple[Any, ...]) -> None:
    stub = StubEngine(replies(((20, 21), reason)))
    result = record_of(stub, group(sampling={"max_tokens": 2}, budget=budget))
    limit = result.truncation and result.truncation.limit
    assert (result.status, result.finish_reason, limit) == expected


def test_max_turns_ends_a_longer_script() -> None:
    result = record_of(StubEngine(), group(environment=script((30,), (31,)), budget={"max_turns": 2}))
    assert (result.status, result.finish_reason) == ("completed", "max_turns")
    assert len(result.segments[0].turns) == 2


def test_on_length_end_is_obeyed_in_a_script() -> None:
    stub = StubEngine(replies(((20, 21), "length")))
    budget = {"on_length": "end"}
    result = record_of(stub, group(sampling={"max_tokens": 2}, budget=budget, environment=script((30,))))
    assert (result.finish_reason, len(result.segments[0].turns)) == ("length", 1)


# What the engine may do.


def test_an_engine_error_is_a_failed_record_with_its_stage() -> None:
    stub = StubEngine(lambda request: refused(request, "bad_request", "stop_ids must lie in [0, 512)", "stop_ids"))
    result = record_of(stub, group())
    assert (result.status, result.finish_reason) == ("failed", "error")
    assert result.error is not None
    assert (result.error.code, result.error.stage, result.error.field) == ("bad_request", "generate", "stop_ids")


def test_a_numerical_error_has_its_own_name_and_is_not_trained_on() -> None:
    def reply(request: Request) -> Completion:
        return completed(request, (20, 21), "error", error=Failure("numerical_error", "not finite"))

    result = record_of(StubEngine(reply), group())
    assert (result.finish_reason, result.segments[0].loss_mask.sum()) == ("numerical_error", 0)
    assert result.segments[0].token_ids.tolist() == [10, 11, 12, 20, 21]


def test_the_engines_death_ends_running_trajectories_and_those_that_come() -> None:
    async def main() -> None:
        stub = StubEngine(held)
        first = await play(stub, group())
        await stub.submitted.get()
        stub.report(died=Failure("internal", "illegal memory access"))
        result = await first.record
        assert result.error is not None
        assert (result.status, result.error.code, result.error.scope) == ("failed", "engine_dead", "worker")
        assert "illegal memory access" in result.error.message

    run(main())


def test_a_weight_update_that_aborts_leaves_a_partial() -> None:
    async def main() -> Record:
        stub = StubEngine(held)
        playing = await play(stub, group())
        request = await stub.submitted.get()
        stub.finish(completed(request, (20, 21), "abort_weight_update"))
        return await playing.record

    result = run(main())
    assert (result.status, result.finish_reason) == ("aborted", "abort_weight_update")
    assert result.segments[0].loss_mask.sum() == 2


def test_a_stale_trajectory_ends_at_its_next_turn() -> None:
    async def main() -> Record:
        stub = StubEngine(held)
        playing = await play(stub, group(max_staleness=1, environment=script((30,))))
        request = await stub.submitted.get()
        stub.version = 4
        stub.finish(completed(request, (20, EOS), version=2))
        return await playing.record

    result = run(main())
    assert (result.status, result.finish_reason) == ("aborted", "abort_stale")
    assert result.segments[0].token_ids.tolist()[-2:] == [90, 30]


# Cancelling and deadlines.


@pytest.mark.parametrize("reason", ["abort_client", "abort_surplus", "abort_shutdown"])
def test_cancelling_a_turn_keeps_what_was_sampled(reason: Any) -> None:
    async def main() -> Record:
        stub = StubEngine(held, partial=(20, 21))
        playing = await play(stub, group())
        await stub.submitted.get()
        playing.rollout.cancel(reason)
        playing.rollout.cancel("abort_stale")
        return await playing.record

    result = run(main())
    check(result)
    assert (result.status, result.finish_reason) == ("aborted", reason)
    assert result.segments[0].loss_mask.sum() == 2
    assert result.segments[0].turns[0].finish_reason == "abort_client"


def test_cancelling_before_the_start_touches_neither_engine_nor_environment() -> None:
    async def main() -> Record:
        stub = StubEngine()
        made: list[Environment] = []
        playing = await play(stub, group(), made.append)
        playing.rollout.cancel("abort_client")
        result = await playing.record
        assert stub.commands == made == []
        playing.rollout.cancel("abort_client")
        return result

    result = run(main())
    check(result)
    assert result.segments[0].turns == ()
    assert result.segments[0].token_ids.tolist() == [10, 11, 12]


def test_cancelling_during_the_last_turn_wins_over_its_natural_end() -> None:
    async def main() -> Record:
        stub = StubEngine(held)
        playing = await play(stub, group())
        request = await stub.submitted.get()
        stub.finish(completed(request, (20, EOS)))
        playing.rollout.cancel("abort_client")
        return await playing.record

    assert run(main()).finish_reason == "abort_client"


def test_a_failure_is_not_hidden_by_cancelling() -> None:
    async def main() -> Record:
        stub = StubEngine(held)
        playing = await play(stub, group())
        request = await stub.submitted.get()
        stub.finish(completed(request, (20,), "error", error=Failure("numerical_error", "not finite")))
        playing.rollout.cancel("abort_client")
        return await playing.record

    result = run(main())
    assert (result.status, result.segments[0].loss_mask.sum()) == ("failed", 0)


@pytest.mark.parametrize("on_length", ["end", "continue"])
def test_a_turn_deadline_cuts_the_turn(on_length: str) -> None:
    async def main() -> Record:
        stub = StubEngine(held, partial=(20, 21))
        budget = {"turn_deadline_s": 0.05, "on_length": on_length}
        playing = await play(stub, group(budget=budget, environment=script((30,))))
        return await playing.record

    result = run(main())
    check(result)
    assert (result.status, result.finish_reason) == ("truncated", "length")
    assert result.truncation is not None
    assert (result.truncation.limit, result.truncation.value) == ("turn_deadline_s", 0.05)
    assert len(result.segments[0].turns) == (1 if on_length == "end" else 2)
    assert {turn.finish_reason for turn in result.segments[0].turns} == {"turn_deadline"}


class Scored(Environment):
    """Counts in class attributes; `step` does what the test says."""

    def __init__(self, step: Callable[[TurnResult], Any], reward: Any = 1.0) -> None:
        self._step = step
        self._reward = reward
        self.finished: list[Record] = []
        self.closed = 0

    async def step(self, turn: TurnResult) -> Step:
        result = self._step(turn)
        return await result if asyncio.iscoroutine(result) else result

    async def finish(self, record: Record) -> Any:
        self.finished.append(record)
        result = self._reward(record) if callable(self._reward) else self._reward
        return await result if asyncio.iscoroutine(result) else result

    async def close(self) -> None:
        self.closed += 1


async def for_ever(*_args: Any) -> Any:
    await asyncio.Event().wait()


def test_a_trajectory_deadline_ends_a_turn_and_the_result_is_scored() -> None:
    env = Scored(lambda _t: Step(), reward=0.5)
    stub = StubEngine(held, partial=(20,))
    result = record_of(stub, group(budget={"trajectory_deadline_s": 0.05}), lambda: env)
    assert (result.status, result.finish_reason, result.reward) == ("truncated", "trajectory_deadline", 0.5)
    assert result.truncation is not None
    assert result.truncation.limit == "trajectory_deadline_s"
    assert result.segments[0].loss_mask.sum() == 1
    assert (len(env.finished), env.closed) == (1, 1)


def test_a_trajectory_deadline_ends_a_wait_for_the_environment() -> None:
    result = record_of(StubEngine(), group(budget={"trajectory_deadline_s": 0.05}), lambda: Scored(for_ever))
    assert (result.finish_reason, result.segments[0].turns[0].finish_reason) == ("trajectory_deadline", "stop")
    assert result.reward == 1.0


def test_a_trajectory_whose_deadline_passed_in_the_queue_never_starts() -> None:
    stub = StubEngine()
    budget = {"trajectory_deadline_s": 1.0}
    result = record_of(stub, group(budget=budget), accepted=time.monotonic() - 2.0)
    assert (result.finish_reason, stub.commands) == ("trajectory_deadline", [])
    assert result.times.queue >= 2.0


def test_a_deadline_that_passes_while_scoring_changes_nothing() -> None:
    async def slow(_record: Record) -> float:
        await asyncio.sleep(0.1)
        return 0.75

    env = Scored(lambda _t: Step(done=True), reward=slow)
    result = record_of(StubEngine(), group(budget={"trajectory_deadline_s": 0.05}), lambda: env)
    assert (result.finish_reason, result.reward) == ("env_done", 0.75)


def test_cancelling_the_task_closes_the_environment_and_aborts_the_request() -> None:
    async def main() -> None:
        stub, env = StubEngine(held), Scored(lambda _t: Step())
        playing = await play(stub, group(), lambda: env)
        await stub.submitted.get()
        playing.record.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing.record
        assert env.closed == 1
        assert stub.held == {}

    run(main())


def test_cancelling_the_task_while_it_closes_leaves_the_record() -> None:
    closing = asyncio.Event()

    class Lingering(Scored):
        async def close(self) -> None:
            closing.set()
            await asyncio.Event().wait()

    async def main() -> None:
        playing = await play(StubEngine(), group(), lambda: Lingering(lambda _t: Step(done=True)))
        await closing.wait()
        playing.record.cancel()
        record: Record = await playing.record
        assert (record.status, record.reward) == ("completed", 1.0)

    run(main())


# Environments.


def test_rewards_of_turns_and_of_the_trajectory() -> None:
    env = Scored(lambda t: Step(observation=[30], reward=t.index / 2, done=t.index == 1), reward={"a": 1.0, "b": 0.5})
    result = record_of(StubEngine(), group(), lambda: env)
    assert [turn.reward for turn in result.segments[0].turns] == [0.0, 0.5]
    assert (result.reward, result.rewards) == (1.5, {"a": 1.0, "b": 0.5})
    (draft,) = env.finished
    assert (draft.status, draft.finish_reason, draft.reward) == ("completed", "env_done", None)
    assert draft.segments[0].token_ids.tolist() == result.segments[0].token_ids.tolist()


def test_nobody_scores_what_was_aborted_or_failed() -> None:
    async def main() -> None:
        stub, env = StubEngine(held), Scored(lambda _t: Step())
        playing = await play(stub, group(), lambda: env)
        await stub.submitted.get()
        playing.rollout.cancel("abort_client")
        assert (await playing.record).reward is None
        assert (env.finished, env.closed) == ([], 1)

    run(main())
    env = Scored(lambda _t: None)
    assert record_of(StubEngine(), group(), lambda: env).status == "failed"
    assert (env.finished, env.closed) == ([], 1)


def test_a_reward_that_fails_is_a_failed_record_and_not_a_zero() -> None:
    env = Scored(lambda _t: Step(done=True), reward=float("nan"))
    result = record_of(StubEngine(), group(), lambda: env)
    assert result.error is not None
    assert (result.status, result.finish_reason, result.error.stage) == ("failed", "env_error", "finish")
    assert result.reward is None
    assert not result.segments[0].loss_mask.any()
    assert result.segments[0].logprobs.any(), "the numbers of a failed trajectory were thrown away"


def test_cancelling_while_scoring_ends_unscored() -> None:
    async def main() -> Record:
        env = Scored(lambda _t: Step(done=True), reward=for_ever)
        playing = await play(StubEngine(), group(), lambda: env)
        while not env.finished:  # noqa: ASYNC110 (the environment has no event to offer)
            await asyncio.sleep(0)
        playing.rollout.cancel("abort_shutdown")
        return await playing.record

    result = run(main())
    assert (result.status, result.finish_reason, result.reward) == ("aborted", "abort_shutdown", None)


def test_an_environment_gets_copies_of_what_it_is_told() -> None:
    class Vandal(Scored):
        async def reset(self, context: Context) -> Observation:
            context.metadata["task"]["goal"] = "changed"  # type: ignore[index]
            context.config["level"] = 99  # type: ignore[index]
            context.prompt[:] = 0
            assert (context.seed, context.sample_index, context.group_id) == (7, 1, "g")
            return Observation(ids=[40], glue=[41], max_tokens=3)

        async def finish(self, record: Record) -> float:
            record.metadata["task"]["goal"] = object()
            record.metadata["rewards"] = {"a": object()}
            return 1.0

    stub = StubEngine()
    submitted = group(
        metadata={"task": {"goal": "x"}}, environment=fields.Environment(name="vandal", config={"level": 1})
    )
    result = record_of(stub, submitted, lambda: Vandal(lambda _t: Step(done=True)))
    assert result.reward == 1.0
    assert result.metadata == submitted.metadata == {"task": {"goal": "x"}}
    assert submitted.environment.config == {"level": 1}
    assert result.segments[0].token_ids.tolist()[:5] == [10, 11, 12, 41, 40]
    assert stub.submitted.get_nowait().max_tokens == 3


def test_two_megabytes_of_observation_do_not_fit_and_nothing_of_them_is_kept() -> None:
    result = record_of(StubEngine(), group(), lambda: Scored(lambda _t: Step(observation=np.zeros(2**19, np.int32))))
    assert (result.status, result.finish_reason) == ("truncated", "context_overflow")
    assert len(result.segments[0].token_ids) == 4
    assert result.reward == 1.0


def test_one_bad_environment_costs_only_its_own_trajectory() -> None:
    """Field report: eight rollouts, one fails in each way, the others return whole."""

    class Bad(Scored):
        def __init__(self, where: str, error: BaseException) -> None:
            super().__init__(self._bad_step, reward=self._bad_reward)
            self._where, self._error = where, error

        async def reset(self, _context: Context) -> None:
            self._raise_at("reset")

        def _bad_step(self, turn: TurnResult) -> Step:
            self._raise_at(f"step {turn.index}")
            return Step(observation=[30], done=turn.index == 2)

        def _bad_reward(self, _record: Record) -> float:
            self._raise_at("finish")
            return 1.0

        def _raise_at(self, where: str) -> None:
            if where == self._where:
                raise self._error

    plan: list[tuple[str, BaseException]] = [
        ("reset", RuntimeError("no reset")),
        ("step 2", RuntimeError("no step")),
        ("finish", RuntimeError("no reward")),
        ("step 0", KeyboardInterrupt("^C")),
        ("step 1", SystemExit(1)),
        *[("nowhere", RuntimeError())] * 3,
    ]

    async def main() -> list[Record]:
        stub = StubEngine()
        engine = AsyncEngine(stub)
        await engine.start()
        plays = [
            Play(stub, engine, group(), lambda where=where, error=error: Bad(where, error), trajectory_id=f"t{i}")
            for i, (where, error) in enumerate(plan)
        ]
        return list(await asyncio.gather(*(each.record for each in plays)))

    results = run(main())
    for result, (where, error) in zip(results, plan, strict=True):
        check(result)
        if where == "nowhere":
            assert (result.status, result.reward, len(result.segments[0].turns)) == ("completed", 1.0, 3)
            continue
        assert result.error is not None
        assert (result.status, result.finish_reason, result.reward) == ("failed", "env_error", None)
        assert result.error.stage == where.split()[0]
        assert str(error) in result.error.message
        assert not result.segments[0].loss_mask.any()
    assert [len(result.segments[0].turns) for result in results[:5]] == [0, 3, 3, 1, 2]


def test_a_fault_of_our_own_is_a_record_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("rollout.trajectory.trajectory.Trajectory.last_turn", broken)
    result = record_of(StubEngine(), group())
    assert result.error is not None
    assert (result.finish_reason, result.error.code, result.error.message) == (
        "error",
        "internal",
        "RuntimeError: a bug",
    )
    assert result.segments[0].token_ids.tolist() == [10, 11, 12]


def test_an_attribute_of_an_environment_that_exits_does_not_end_the_loop() -> None:
    class Exits(Scored):
        @property
        def patient(self) -> bool:  # type: ignore[override]
            raise SystemExit(3)

    result = record_of(StubEngine(), group(), lambda: Exits(lambda _t: Step(done=True)))
    assert result.error is not None
    assert (result.finish_reason, result.error.message) == ("error", "SystemExit: 3")


# The trainer as the environment.


def answer_to(asked: TurnDone, **changes: Any) -> Continue:
    fitting = {"id": "c", "trajectory_id": "t", "turn": asked.turn.index, "expected_len": asked.total_len}
    return Continue(**{**fitting, **changes})


def test_the_trainer_answers_turn_by_turn() -> None:
    async def main() -> Record:
        stub = StubEngine()
        playing = await play(stub, group(environment=REMOTE))
        first = await playing.turns.get()
        assert (first.trajectory_id, first.turn.index, first.total_len, first.id) == ("t", 0, 4, "")
        assert (first.token_ids.tolist(), first.logprobs.tolist()) == ([7], [-0.125])
        assert playing.rollout.pending_turn == first
        playing.rollout.answer(answer_to(first, glue=ids(90), observation=ids(30), max_tokens=3, turn_reward=0.25))
        assert playing.rollout.pending_turn is None
        second = await playing.turns.get()
        assert second.total_len == 7
        playing.rollout.answer(answer_to(second, done=True, reward=2.0, rewards={"a": 1.0}))
        result = await playing.record
        playing.rollout.answer(answer_to(second, id="again", done=True, reward=2.0, rewards={"a": 1.0}))
        return result

    result = run(main())
    check(result)
    assert (result.finish_reason, result.reward, result.rewards) == ("env_done", 2.0, {"a": 1.0})
    assert result.segments[0].token_ids.tolist() == [10, 11, 12, 7, 90, 30, 7]
    assert [turn.reward for turn in result.segments[0].turns] == [0.25, None]


def test_an_answer_is_taken_once_and_anything_else_is_a_mismatch() -> None:
    async def main() -> None:
        stub = StubEngine()
        playing = await play(stub, group(environment=REMOTE))
        with pytest.raises(PrefixMismatch, match="no turn waits"):
            playing.rollout.answer(Continue(id="c", trajectory_id="t", turn=0, expected_len=4))
        first = await playing.turns.get()
        for wrong, field in (({"turn": 1}, "turn"), ({"expected_len": 5}, "expected_len")):
            with pytest.raises(PrefixMismatch) as caught:
                playing.rollout.answer(answer_to(first, **wrong))
            assert caught.value.field == field
        for name in ("glue", "observation"):
            with pytest.raises(BadRequest) as refusal:
                playing.rollout.answer(answer_to(first, **{name: ids(1, 512)}))
            assert refusal.value.field == f"{name}[1]"
        assert playing.rollout.pending_turn == first, "a refused answer was taken"
        playing.rollout.answer(answer_to(first, observation=ids(30)))
        playing.rollout.answer(answer_to(first, observation=ids(30)))
        with pytest.raises(PrefixMismatch, match="already answered"):
            playing.rollout.answer(answer_to(first, observation=ids(31)))
        second = await playing.turns.get()
        playing.rollout.answer(answer_to(first, observation=ids(30)))
        assert playing.rollout.pending_turn == second
        playing.rollout.cancel("abort_client")
        await playing.record
        assert not playing.rollout.answer(answer_to(second, done=True)), "it is too late, which is no fault"

    run(main())


def test_a_silent_trainer_is_waited_for_unless_a_deadline_was_set() -> None:
    async def main() -> None:
        stub = StubEngine()
        engine = AsyncEngine(stub)
        await engine.start()
        patient = Play(stub, engine, group(environment=REMOTE))
        turn = await patient.turns.get()
        limited = Play(stub, engine, group(environment=REMOTE, budget={"tool_deadline_s": 0.05}), trajectory_id="u")
        result = await limited.record
        assert result.truncation is not None
        assert (result.finish_reason, result.truncation.limit) == ("tool_deadline", "tool_deadline_s")
        assert result.status == "truncated"
        assert limited.rollout.pending_turn is None
        assert not patient.record.done()
        patient.rollout.answer(answer_to(turn, done=True))
        assert (await patient.record).finish_reason == "env_done"

    run(main())


def test_the_trainer_may_answer_inside_the_callback() -> None:
    async def main() -> Record:
        stub = StubEngine()
        engine = AsyncEngine(stub)
        await engine.start()
        rollout = Rollout(
            spec(group(environment=REMOTE)),
            engine=engine,
            environment=REGISTRY.resolve(REMOTE),
            model=MODEL,
            on_turn=lambda turn: rollout.answer(answer_to(turn, done=True)),
        )
        return await rollout.run()

    assert run(main()).finish_reason == "env_done"


def test_a_plug_in_may_ask_the_trainer_too_but_once_a_turn() -> None:
    class Half(Environment):
        patient = True

        async def reset(self, context: Context) -> None:
            self.ask = context.ask

        async def step(self, turn: TurnResult) -> Step:
            answer = await self.ask(turn)
            if turn.index == 1:
                await self.ask(turn)
            return Step(observation=answer.observation, reward=0.5)

    async def main() -> Record:
        playing = await play(StubEngine(), group(), Half)
        for _ in range(2):
            playing.rollout.answer(answer_to(await playing.turns.get(), observation=ids(30)))
        return await playing.record

    result = run(main())
    assert result.error is not None
    assert (result.finish_reason, result.error.stage) == ("env_error", "step")
    assert "once" in result.error.message
    assert result.segments[0].turns[0].reward == 0.5


# Where the time went.


def test_the_parts_add_up_to_wall_time_and_each_wait_is_where_it_belongs() -> None:
    async def main() -> Record:
        stub = StubEngine(held)

        async def slow(turn: TurnResult) -> Step:
            await asyncio.sleep(0.05)
            return Step(done=turn.index == 1)

        playing = await play(stub, group(), lambda: Scored(slow), accepted=time.monotonic() - 0.5)
        for _ in range(2):
            request = await stub.submitted.get()
            await asyncio.sleep(0.04)
            stub.finish(completed(request, (20, EOS), times=EngineTimes(prefill=0.01, decode=0.02, paused=0.005)))
        return await playing.record

    result = run(main())
    check(result)
    times = result.times
    assert times.queue >= 0.5
    assert (times.prefill, times.decode, times.paused) == pytest.approx((0.02, 0.04, 0.01))
    assert times.tool_wait >= 0.1
    for turn in result.segments[0].turns:
        assert turn.times.tool_wait >= 0.05
        assert turn.times.queue + turn.times.prefill + turn.times.decode + turn.times.paused >= 0.04
    assert result.wall_s >= 0.5 + 2 * 0.09


def test_an_engine_that_claims_more_than_passed_is_scaled_down() -> None:
    def reply(request: Request) -> Completion:
        return completed(request, times=EngineTimes(prefill=1000.0, decode=3000.0))

    result = record_of(StubEngine(reply), group())
    assert result.wall_s < 60
    assert result.times.decode == pytest.approx(3 * result.times.prefill)
    assert result.segments[0].turns[0].times != Times()


# On the real engine.


@pytest.mark.parametrize("lazy", [False, True])
def test_sixty_four_trajectories_on_the_real_loop(lazy: bool) -> None:
    class Guess(Environment):
        """Blocks on a thread of its own, and scores by what it saw."""

        def reset(self, context: Context) -> None:
            self.context = context

        def step(self, turn: TurnResult) -> Step:
            return Step(observation=[30 + turn.index], done=turn.index == 2, reward=float(turn.index))

        def finish(self, record: Record) -> float:
            return float(len(record.segments[0].token_ids))

    async def main() -> list[Record]:
        runner = FakeRunner(lazy=lazy, num_blocks=20)
        engine = AsyncEngine(
            ThreadEngine(Engine(runner, EngineConfig(max_running=16, max_context=64)), FakeWeights(runner))
        )
        await engine.start()
        rollouts = []
        orders = itertools.count()
        for i in range(64):
            made = group(
                sampling={"max_tokens": 9, "ignore_eos": True},
                budget={"on_length": "continue"},
                environment=script((30,), (31,), glue=()) if i % 2 else fields.Environment(),
            )
            environment = REGISTRY.resolve(made.environment) if i % 2 else Guess
            rollouts.append(
                Rollout(
                    spec(made, trajectory_id=f"t{i}", sample_index=i // 2, order=next(orders)),
                    engine=engine,
                    environment=environment,
                    model=MODEL,
                    on_turn=print,
                )
            )
        results = await asyncio.gather(*(rollout.run() for rollout in rollouts))
        assert engine.stats.cached_prompt_tokens_total > 0
        assert engine.stats.running == engine.stats.waiting == 0
        assert await engine.close(10)
        return list(results)

    results = run(main())
    for scripted, guessed in zip(results[1::2], results[::2], strict=True):
        for result in (scripted, guessed):
            check(result)
            (segment,) = result.segments
            assert len(segment.token_ids) == 3 + 3 * 9 + 2
            assert segment.loss_mask.sum() == 27
        assert scripted.segments[0].token_ids.tolist() == guessed.segments[0].token_ids.tolist()
        assert (scripted.finish_reason, guessed.finish_reason) == ("length", "env_done")
        assert guessed.reward == 32.0
        assert [turn.reward for turn in guessed.segments[0].turns] == [0.0, 1.0, 2.0]
