"""The engine's asyncio face: one completion for each request, in order, whatever happens in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handle import (
    Abort,
    Committed,
    CommitWeights,
    DiscardWeights,
    Pause,
    Prepared,
    PrepareWeights,
    Resume,
    Submit,
    WeightsFailed,
)
from engine.handles.thread import ThreadEngine
from engine.request import Completion, Failure, Request
from engine.step import WeightsInfo
from protocols.errors import EngineDead, Internal, WeightsBusy, WeightsInvalid
from rollout.generation.async_engine import AsyncEngine
from tests.fake_runner import FakeRunner, FakeWeights
from tests.rollout.stub_engine import StubEngine, completed, refused


def request(name: str = "a", **changes: object) -> Request:
    return Request(name, np.array([1, 2, 3], np.int32), 8, **changes)


def drive(test: Callable[[StubEngine, AsyncEngine], Awaitable[None]], stub: StubEngine | None = None) -> None:
    async def main() -> None:
        handle = stub or StubEngine()
        engine = AsyncEngine(handle)
        await engine.start()
        await test(handle, engine)

    asyncio.run(asyncio.wait_for(main(), 20))


def held(_request: Request) -> None:
    return None


def test_requests_of_one_tick_are_one_submit() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        done = await asyncio.gather(*(engine.generate(request(f"r{i}")) for i in range(50)))
        assert [completion.request_id for completion in done] == [f"r{i}" for i in range(50)]
        (submit,) = stub.commands
        assert isinstance(submit, Submit)
        assert [r.id for r in submit.requests] == [f"r{i}" for i in range(50)]

    drive(test)


def test_commands_of_one_tick_keep_their_order() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(engine.generate(request("a")))
        await asyncio.sleep(0)
        engine.abort(("a",), "abort_client")
        engine.pause()
        second = asyncio.ensure_future(engine.generate(request("b")))
        await asyncio.sleep(0)
        assert (await first).finish_reason == "abort_client"
        engine.resume()
        engine.discard_weights("u")
        engine.abort(("b",), "turn_deadline")
        engine.abort(("b",), "abort_client")
        assert (await second).finish_reason == "turn_deadline"
        kinds = [type(command) for command in stub.commands]
        assert kinds == [Submit, Abort, Pause, Submit, Resume, DiscardWeights, Abort, Abort]

    drive(test, StubEngine(held))


def test_aborts_of_one_reason_are_one_command_and_unknown_ids_cost_nothing() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        tasks = [asyncio.ensure_future(engine.generate(request(name))) for name in "abc"]
        for _ in tasks:
            await stub.submitted.get()
        engine.abort(("a", "never seen"), "abort_client")
        engine.abort(("b", "c"), "abort_client")
        engine.abort(("never seen",), "abort_client")
        done = await asyncio.gather(*tasks)
        assert [c.finish_reason for c in done] == ["abort_client"] * 3
        assert stub.commands[1:] == [Abort(("a", "b", "c"), "abort_client")]
        engine.abort(("a",), "abort_client")
        await asyncio.sleep(0)
        assert len(stub.commands) == 2

    drive(test, StubEngine(held))


def test_an_error_is_returned() -> None:
    async def test(_stub: StubEngine, engine: AsyncEngine) -> None:
        completion = await engine.generate(request())
        assert completion.error == Failure("prompt_too_long", "long", "token_ids")

    drive(test, StubEngine(lambda r: refused(r, "prompt_too_long", "long", "token_ids")))


def test_cancelling_the_caller_aborts_the_request_and_its_id_is_free_after_its_end() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        first = asyncio.ensure_future(engine.generate(request()))
        await stub.submitted.get()
        stub.partial = ()
        ended: asyncio.Queue[Completion] = asyncio.Queue()
        finish, stub.finish = stub.finish, ended.put_nowait  # type: ignore[method-assign]
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.ensure_future(engine.generate(request()))
        aborted = await ended.get()
        assert aborted.finish_reason == "abort_client"
        assert stub.submitted.empty(), "an id was used while its first request was not over"
        stub.finish = finish  # type: ignore[method-assign]
        finish(aborted)
        again = await stub.submitted.get()
        stub.finish(completed(again, (9, 9)))
        assert (await second).token_ids.tolist() == [9, 9]

    drive(test, StubEngine(held))


def test_death_ends_everything_that_waits_and_everything_that_comes() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        waiting = asyncio.ensure_future(engine.generate(request("a", logprob_modes=("raw", "processed"))))
        prepare = asyncio.ensure_future(engine.prepare_weights("u", "/w", 1))
        died = asyncio.ensure_future(engine.wait_died())
        last = asyncio.ensure_future(engine.generate(request("b")))
        await stub.submitted.get()
        await stub.submitted.get()
        stub.report(completions=(completed(stub.held["b"], (4,)),), died=Failure("internal", "CUDA error"))
        assert (await last).token_ids.tolist() == [4], "what the last report brought was lost"
        completion = await waiting
        assert completion.error == Failure("engine_dead", "CUDA error")
        assert completion.logprobs.keys() == {"raw", "processed"}
        with pytest.raises(EngineDead, match="CUDA error"):
            await prepare
        assert (await died).message == "CUDA error"
        assert engine.died is not None
        assert (await engine.generate(request("c"))).error == Failure("engine_dead", "CUDA error")
        with pytest.raises(EngineDead):
            await engine.commit_weights("u")
        sent = len(stub.commands)
        engine.pause()
        engine.abort(("a",), "abort_client")
        await asyncio.sleep(0)
        assert len(stub.commands) == sent

    drive(test, StubEngine(held))


def test_a_handle_that_takes_no_command_is_dead() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        stub.refuses = RuntimeError("the pipe is broken")
        completion = await engine.generate(request())
        assert completion.error is not None
        assert "the pipe is broken" in completion.error.message
        assert engine.died is not None

    drive(test)


def test_weights_are_prepared_and_committed() -> None:
    info = WeightsInfo(version=4, digest="sha256:00", nbytes=10, seconds=0.5)

    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        prepare = asyncio.ensure_future(engine.prepare_weights("u", "/w", 4, {"a": "sha256:1"}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stub.commands == [PrepareWeights("u", "/w", 4, {"a": "sha256:1"})]
        with pytest.raises(WeightsBusy):
            await engine.prepare_weights("u", "/w", 4)
        stub.report(weights=(Prepared("u", info),))
        assert await prepare == info
        commit = asyncio.ensure_future(engine.commit_weights("u", "abort", 5.0, "fail"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stub.commands[1:] == [CommitWeights("u", "abort", 5.0, "fail")]
        stub.version = 4
        stub.report(weights=(Committed("u", info, 0.25),))
        assert (await commit).paused == 0.25
        assert engine.stats.weight_version == 4

    drive(test)


@pytest.mark.parametrize(
    ("code", "error"), [("weights_invalid", WeightsInvalid), ("weights_busy", WeightsBusy), ("unheard_of", Internal)]
)
def test_a_failed_update_raises_the_wires_error(code: str, error: type[Exception]) -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        for begin in (lambda: engine.prepare_weights("u", "/w", 1), lambda: engine.commit_weights("u")):
            future = asyncio.ensure_future(begin())
            await asyncio.sleep(0)
            stub.report(weights=(WeightsFailed("u", Failure(code, "shape", "model.norm.weight")),))
            with pytest.raises(error, match="shape") as caught:
                await future
            assert caught.value.field == "model.norm.weight"  # type: ignore[attr-defined]
        stub.report(weights=(WeightsFailed("never asked", Failure(code, "x")),))
        await asyncio.sleep(0)

    drive(test)


def test_closing_ends_what_waits() -> None:
    async def test(stub: StubEngine, engine: AsyncEngine) -> None:
        waiting = asyncio.ensure_future(engine.generate(request()))
        await stub.submitted.get()
        assert await engine.close(1.0)
        assert stub.closed
        completion = await waiting
        assert completion.error is not None
        assert completion.error.code == "engine_dead"

    drive(test, StubEngine(held))


def test_a_report_after_the_loop_has_closed_is_harmless() -> None:
    stub = StubEngine()

    async def main() -> None:
        await AsyncEngine(stub).start()

    asyncio.run(main())
    stub.report()


@pytest.mark.parametrize("lazy", [False, True])
def test_the_real_engine_in_its_thread(lazy: bool) -> None:
    async def main() -> None:
        runner = FakeRunner(lazy=lazy, num_blocks=512)
        engine = AsyncEngine(ThreadEngine(Engine(runner, EngineConfig(max_running=8)), FakeWeights(runner)))
        await engine.start()
        done = await asyncio.gather(*(engine.generate(request(f"r{i}")) for i in range(20)))
        assert [len(completion.token_ids) for completion in done] == [8] * 20
        long = asyncio.ensure_future(engine.generate(Request("long", np.array([1], np.int32), 3000)))
        info = await engine.prepare_weights("u", "7", 2)
        assert info.digest == "fake:7"
        await engine.commit_weights("u", "abort")
        assert (await long).finish_reason == "abort_weight_update"
        assert engine.stats.weight_version == 2
        with pytest.raises(WeightsInvalid):
            await engine.prepare_weights("v", "nowhere", 3)
        engine.pause()
        paused = asyncio.ensure_future(engine.generate(request("paused")))
        engine.abort(("paused",), "abort_client")
        await asyncio.sleep(0)
        engine.abort(("paused",), "abort_client")
        assert (await paused).finish_reason == "abort_client"
        assert await engine.close(10)
        assert threading.active_count() < 10

    asyncio.run(asyncio.wait_for(main(), 60))
