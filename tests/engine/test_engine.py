"""The engine as a whole, on a `FakeRunner`: ends, times, versions, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from engine.errors import WeightsInvalid
from engine.request import Completion, SamplingParams, StopRule
from tests.engine.host import Host, ask, assert_same, solo

MakeHost = Callable[..., Host]


def test_the_last_token_of_the_last_request_needs_no_further_launch(make_host: MakeHost) -> None:
    host = make_host()
    host.add(ask("a", 20, 3))
    assert [len(host.step()) for _ in range(4)] == [0, 0, 0, 1]
    assert len(host.runner.plans) == 3
    assert (host.engine.stats().steps_total, host.engine.stats().prompt_steps_total) == (3, 1)
    assert not host.engine.has_work
    assert host.step() == []
    assert len(host.runner.plans) == 3


def test_without_overlap_each_step_is_read_before_the_next_is_launched(make_host: MakeHost) -> None:
    host = make_host(overlap=False)
    host.run(ask("a", 20, 5), ask("b", 30, 5))
    kinds = [kind for kind, _ in host.runner.events]
    assert kinds == ["launch", "wait"] * (len(kinds) // 2)
    stats = host.engine.stats()
    assert stats.wasted_rows_total == stats.bubbles_total == 0


def test_a_completion_has_what_was_asked_for(make_host: MakeHost) -> None:
    host = make_host()
    fields: dict[str, Any] = {"logprob_modes": ("raw", "temperature"), "top_logprobs": 3}
    ended = host.run(ask("a", 20, 6, **fields), ask("b", 20, 6, top_logprobs=1), ask("c", 20, 6))
    a = ended["a"]
    assert list(a.logprobs) == ["raw", "temperature"]
    np.testing.assert_array_equal(a.logprobs["temperature"] - 1, a.logprobs["raw"])
    assert a.top_ids is not None
    assert a.top_logprobs is not None
    assert a.top_ids.shape == a.top_logprobs.shape == (6, 3)
    assert a.top_ids[:, 0].tolist() == a.token_ids.tolist()
    assert a.token_ids.dtype == a.top_ids.dtype == np.int32
    assert a.logprobs["raw"].dtype == a.top_logprobs.dtype == np.float32
    assert ended["b"].top_ids is not None
    assert ended["b"].top_ids.shape == (6, 1)
    assert ended["c"].top_ids is ended["c"].top_logprobs is ended["c"].prompt_logprobs is None


def test_a_completion_owns_its_arrays(make_host: MakeHost) -> None:
    host = make_host(max_running=1)
    first = host.run(ask("a", 20, 6))["a"]
    before = first.token_ids.tolist(), first.logprobs["processed"].tolist()
    host.run(ask("b", 30, 20))
    assert (first.token_ids.tolist(), first.logprobs["processed"].tolist()) == before


def text(runner_text: bytes) -> dict[str, Any]:
    """A runner that writes these bytes from position 20 on."""
    return {"script": lambda _params, position: runner_text[position - 20] if position - 20 < len(runner_text) else 1}


@pytest.mark.parametrize(
    ("strings", "reply", "stop"),
    [
        ((b"STOP",), b"Hello STOP", b"STOP"),
        ((b"ll",), b"Hell", b"ll"),
        ((b"STOP now", b"TO"), b"Hello STO", b"TO"),
        ((b"nowx!",), b"Hello STOP nowx!", b"nowx!"),
    ],
)
def test_a_stop_string_ends_at_the_token_that_completes_it(
    make_host: MakeHost, strings: tuple[bytes, ...], reply: bytes, stop: bytes
) -> None:
    host = make_host(runner=text(b"Hello STOP nowx!"))
    prompt = list(b"STOP now ll nowx!..."[:20])
    ended = host.run(ask("a", prompt, 16, stop=StopRule(strings=strings)))["a"]
    assert bytes(ended.token_ids.tolist()) == reply
    assert (ended.finish_reason, ended.stop) == ("stop", stop)
    assert len(ended.logprobs["processed"]) == len(reply)


def test_a_stop_on_the_last_allowed_token_is_a_stop(make_host: MakeHost) -> None:
    host = make_host(runner=text(b"abcd"))
    stops = (StopRule(strings=(b"cd",)), StopRule(ids=frozenset(b"d")), StopRule(strings=(b"de",)))
    requests = [ask(f"{i}", 20, 4, stop=stop) for i, stop in enumerate(stops)]
    ended = host.run(*requests)
    assert [ended[f"{i}"].finish_reason for i in range(3)] == ["stop", "stop", "length"]
    assert [ended[f"{i}"].stop for i in range(3)] == [b"cd", ord("d"), None]


def test_a_stop_string_survives_a_preemption(make_host: MakeHost) -> None:
    """The match begins before the preemption and ends after it."""
    host = make_host(runner=text(b"a" * 30 + b"STOP"))
    host.add(ask("a", 20, 60, stop=StopRule(strings=(b"aSTOP",))))
    host.step(32)
    host.engine.drain()
    host.engine._preempt(host.scheduler.newest_running())
    ended = host.run()["a"]
    assert ended.preemptions == 1
    assert ended.stop == b"aSTOP"
    assert len(ended.token_ids) == 34


@pytest.mark.parametrize("begun", [0, 3, 4])
def test_a_stop_string_may_begin_in_what_the_turn_had_before_it_was_cut(make_host: MakeHost, begun: int) -> None:
    """And in nothing that was there before the turn."""
    host = make_host(runner=text(b"P and on"))
    prompt = list(b"no matter what " + b"xaSTO")
    ended = host.run(ask("a", prompt, 8, stop=StopRule(strings=(b"STOP",)), begun=begun))["a"]
    assert (ended.stop, len(ended.token_ids)) == ((b"STOP", 1) if begun else (None, 8))


@pytest.mark.parametrize("when", [0, 1, 2, 5, 30])
def test_an_abort_gives_one_end_with_the_tokens_so_far(make_host: MakeHost, when: int) -> None:
    host = make_host(max_step_tokens=16)
    request, other = ask("a", 20, 12), ask("b", 20, 12)
    host.add(request, other)
    host.step(when)
    host.engine.abort("a", "abort_client")
    host.engine.abort("a", "turn_deadline")
    host.engine.abort("unknown", "abort_client")
    ended = host.run()
    assert_same(ended["b"], solo(other))
    expected = solo(request)
    if when == 30:
        assert_same(ended["a"], expected)
    else:
        assert ended["a"].finish_reason == "abort_client"
        count = max(0, when - 2)
        assert ended["a"].token_ids.tolist() == expected.token_ids[:count].tolist()
        assert ended["a"].logprobs["processed"].tolist() == expected.logprobs["processed"][:count].tolist()


def test_an_abort_in_the_burst_of_the_last_token_changes_nothing(make_host: MakeHost) -> None:
    host = make_host()
    host.add(ask("a", 20, 1))
    host.step(2)
    assert host.ended["a"].finish_reason == "length"
    host.engine.abort("a", "abort_client")
    assert not host.engine.has_work


def test_an_aborted_score_has_no_half_of_it(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    host.add(ask("a", 60, 4, prompt_logprobs=True))
    host.step(2)
    host.engine.abort("a", "abort_client")
    assert host.run()["a"].prompt_logprobs is None


def test_a_score_that_is_not_a_number_is_an_error(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(max_step_tokens=64)
    monkeypatch.setattr("tests.fake_runner.logprob", lambda _seen, token_id: np.nan if token_id == 9 else -1.0)
    requests = [ask("a", [1, 9, 3], 5, prompt_logprobs=True), ask("b", [1, 2, 3], 5, prompt_logprobs=True)]
    ended = host.run(*requests)
    assert ended["a"].error is not None
    assert ended["a"].error.code == "numerical_error"
    assert ended["a"].token_ids.tolist() == []
    assert ended["b"].finish_reason == "length"


def test_an_impossible_target_is_not_an_error(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minus infinity is what a filter says about an id that it drops."""
    monkeypatch.setattr("tests.fake_runner.logprob", lambda _seen, token_id: -np.inf if token_id == 9 else -1.0)
    ended = make_host().run(ask("a", [1, 9, 3], 0, prompt_logprobs=True))["a"]
    assert ended.prompt_logprobs is not None
    assert ended.prompt_logprobs["processed"].tolist()[1:] == [-np.inf, -1.0]


def test_a_pause_launches_nothing_and_loses_nothing(make_host: MakeHost) -> None:
    host = make_host()
    requests = [ask("a", 20, 10), ask("b", 20, 10), ask("late", 20, 4)]
    host.add(*requests[:2])
    host.step(3)
    host.engine.pause()
    launched = len(host.runner.plans)
    host.add(requests[2])
    host.step(3)
    assert len(host.runner.plans) == launched
    assert not host.engine.has_work
    assert host.engine.stats().paused
    host.engine.abort("b", "abort_client")
    assert [completion.request_id for completion in host.step()] == ["b"]
    host.engine.resume()
    ended = host.run()
    assert_same(ended["a"], solo(requests[0]))
    assert_same(ended["late"], solo(requests[2]))


def test_hold_starts_nobody_new_but_lets_the_preempted_come_back(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10})
    started = [ask("a", 16, 96, order=1), ask("b", 16, 96, order=2)]
    host.add(*started)
    host.step(2)
    host.add(ask("new", 16, 3, order=0))
    host.engine.hold()
    ended = host.run()
    assert set(ended) == {"a", "b"}
    assert ended["b"].preemptions > 0
    assert not host.engine.has_started
    assert host.engine.stats().waiting == 1
    host.engine.release()
    assert set(host.run()) == {"a", "b", "new"}


def test_seconds_by_phase_add_up_to_the_time_in_the_engine(make_host: MakeHost) -> None:
    host = make_host(max_running=1, max_step_tokens=16)
    host.add(ask("first", 20, 4), ask("second", 20, 4))
    for _ in range(30):
        host.clock.now += 1
        host.step()
    first, second = (host.ended[name].times for name in ("first", "second"))
    # Steps of `first`: two chunks, three decodes; each is read one step after its launch.
    assert (first.queue, first.prefill, first.decode) == (1, 2, 3)
    assert (second.queue, second.prefill, second.decode) == (7, 2, 3)
    assert first.preempted == first.paused == 0
    assert sum(astuple(second)) == 12


def test_a_pause_is_in_no_other_phase(make_host: MakeHost) -> None:
    host = make_host(max_running=1)
    host.add(ask("a", 20, 6), ask("b", 20, 6))
    start = host.clock.now
    for step in range(30):
        host.clock.now += 1
        if step == 3:
            host.engine.pause()
            host.clock.now += 10
            host.add(ask("c", 20, 1))
            host.clock.now += 10
            host.engine.commit(lambda: setattr(host.clock, "now", host.clock.now + 5), 2)
            host.engine.resume()
        host.step()
        for name, completion in host.ended.items():
            if completion.times.paused:
                assert completion.times.paused == (15 if name == "c" else 25)
    assert len(host.ended) == 3
    assert host.ended["a"].times.queue == 1
    assert sum(astuple(host.ended["a"].times)) == 25 + 7
    assert host.clock.now == start + 30 + 25


def test_preempted_seconds_are_counted_apart(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10})
    host.add(ask("a", 16, 96, order=1), ask("b", 16, 96, order=2))
    while host.engine.has_work:
        host.clock.now += 1
        host.step()
    a, b = host.ended["a"].times, host.ended["b"].times
    assert a.preempted == 0
    assert b.preempted > 30, "it waited for most of a's reply"
    assert sum(astuple(b)) == host.clock.now - 100


def version_runs(completion: Completion) -> list[tuple[int, int]]:
    return list(completion.weight_versions)


def test_each_token_has_the_version_that_served_when_its_step_was_launched(make_host: MakeHost) -> None:
    host = make_host()
    host.add(ask("a", 20, 10))
    host.step(4)
    apply = lambda: setattr(host.runner, "weights", 5)  # noqa: E731
    assert host.engine.commit(apply, 7) == 0
    host.add(ask("b", 20, 10))
    ended = host.run()
    assert version_runs(ended["a"]) == [(1, 4), (7, 6)], "four steps had been launched, and the pipe was drained"
    assert ended["a"].kv_version == 1
    assert version_runs(ended["b"]) == [(7, 10)]
    assert ended["b"].kv_version == 7
    assert host.engine.stats().weight_version == 7


def test_runs_of_one_version_are_one_run(make_host: MakeHost) -> None:
    host = make_host()
    host.add(ask("a", 20, 10))
    for _ in range(3):
        host.step(2)
        host.engine.commit(lambda: None, 4)
    assert version_runs(host.run()["a"]) == [(1, 2), (4, 8)]


def test_a_request_that_never_started_has_the_serving_version(make_host: MakeHost) -> None:
    host = make_host()
    host.engine.commit(lambda: None, 9)
    host.add(ask("a"))
    host.engine.abort("a", "abort_client")
    ended = host.run()["a"]
    assert (ended.weight_versions, ended.kv_version) == ((), 9)


def test_kv_of_old_weights_is_neither_hit_nor_published(make_host: MakeHost) -> None:
    host = make_host()
    prompt = range(1, 65)
    old = ask("old", prompt, 3)
    host.run(old)
    running = ask("running", [*prompt, 9, 9], 40)
    host.add(running)
    host.step(3)
    apply = lambda: setattr(host.runner, "weights", 5)  # noqa: E731
    host.engine.commit(apply, 1)
    fresh = ask("fresh", prompt, 3)
    host.run(fresh)
    assert host.ended["fresh"].cached_tokens == 0
    new = Host(runner={"num_blocks": 64})
    new.runner.weights = 5
    assert host.ended["fresh"].token_ids.tolist() == new.run(fresh)["fresh"].token_ids.tolist()
    assert host.ended["running"].cached_tokens == 64
    reply = [*prompt, 9, 9, *host.ended["running"].token_ids.tolist()]
    again = host.run(ask("again", reply, 3))["again"]
    assert again.cached_tokens == 64, "blocks of `fresh`, none of those that `running` computed under both"


def test_preempted_after_a_commit_it_is_computed_again_under_the_new_weights(make_host: MakeHost) -> None:
    host = make_host()
    host.add(ask("a", 20, 30))
    host.step(5)
    host.engine.commit(lambda: setattr(host.runner, "weights", 5), 2)
    sampled = host.engine._live["a"]
    known = host.scheduler.table.sampled["id"][0, 20:25].tolist()
    host.engine._preempt(sampled)
    ended = host.run()["a"]
    assert ended.token_ids[:5].tolist() == known, "a returned token was sampled again"
    assert version_runs(ended) == [(1, 5), (2, 25)]
    assert ended.kv_version == 1
    turn = ask("b", [*ask("a", 20).token_ids, *ended.token_ids, 1], 3)
    assert host.run(turn)["b"].cached_tokens == 48, "all of its KV is of the new weights"


def test_a_commit_that_fails_leaves_the_old_weights_serving(make_host: MakeHost) -> None:
    host = make_host()
    request = ask("a", 40, 10)
    host.add(request)
    host.step(3)

    def apply() -> None:
        raise WeightsInvalid("no")

    with pytest.raises(WeightsInvalid):
        host.engine.commit(apply, 2)
    ended = host.run()["a"]
    assert_same(ended, solo(request))
    assert version_runs(ended) == [(1, 10)]
    assert host.run(ask("b", request.token_ids.tolist(), 2))["b"].cached_tokens == 32


def test_counters_add_up(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 14})
    prompt = list(range(1, 34))
    requests = [ask(f"{i}", prompt, 70, params=SamplingParams(seed=i), group="g") for i in range(5)]
    ended = host.run(*requests)
    stats = host.engine.stats()
    assert stats.sampled_tokens_total == sum(len(c.token_ids) for c in ended.values()) == 350
    assert stats.prompt_tokens_total == 5 * 33
    assert stats.cached_prompt_tokens_total == sum(c.cached_tokens for c in ended.values())
    assert stats.preemptions_total == sum(c.preemptions for c in ended.values()) > 0
    assert stats.computed_prompt_tokens_total >= stats.prompt_tokens_total - stats.cached_prompt_tokens_total
    assert stats.steps_total == len(host.runner.plans)
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (0, 0, 0, 13)


def test_gauges_while_running(make_host: MakeHost) -> None:
    host = make_host(max_running=2)
    host.add(*(ask(f"{i}", 20, 5) for i in range(5)))
    host.step()
    stats = host.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (2, 3, 4)


def test_one_slot_one_block_at_a_time(make_host: MakeHost) -> None:
    """The smallest engine there can be."""
    host = make_host(max_running=1, max_step_tokens=1, max_context=16, runner={"num_blocks": 2})
    requests = [ask(f"{i}", 1 + i, 15 - i) for i in range(4)]
    ended = host.run(*requests)
    for request in requests:
        assert_same(ended[request.id], solo(request, max_context=16))
