"""KV held between turns: who loses it when, what the next turn finds, and that nothing is lost or leaked by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import BLOCK_SIZE
from engine.request import Completion, Request, SamplingParams
from engine.scheduling import sequence as sequences
from engine.scheduling.block_pool import BlockPool, block_key, root_key
from engine.scheduling.kv_holds import LONG_WAIT, KvHolds
from engine.scheduling.phases import PausableClock, PhaseTimes
from engine.scheduling.sequence import Sequence
from tests.engine.host import Host, ask, assert_same, solo

MakeHost = Callable[..., Host]


# Whose KV goes first.


class Bench:
    """Holds over a pool, made of sequences that never ran."""

    def __init__(self, num_blocks: int = 101) -> None:
        self.pool = BlockPool(num_blocks)
        self.holds = KvHolds(self.pool)
        self._keys = root_key(0)

    def hold(self, name: str, order: int, count: int = 2, wait: float = 0.0, returned: bool = False) -> list[int]:
        sequence = self.sequence(name, order, wait)
        blocks = self.pool.allocate(count)
        for block in blocks:
            self._keys = block_key(self._keys, bytes(64))
            self.pool.publish([block], [self._keys])
        self.holds.begin(sequence, blocks)
        self.pool.release(blocks)
        if returned:
            self.holds.returned(sequence)
        return blocks

    @staticmethod
    def sequence(name: str, order: int, wait: float = 0.0) -> Sequence:
        request = ask(name, 5, 5, order=order, trajectory=name, goes_on=True, expected_wait=wait)
        return Sequence(request, 0, 256, PhaseTimes(PausableClock(lambda: 0.0)))

    def victims(self) -> list[str]:
        return [hold.key for hold in self.holds.victims()]

    def victims_of(self, name: str, order: int, *, idle: bool = False) -> list[str]:
        return [hold.key for hold in self.holds.victims_of(self.sequence(name, order), idle=idle)]


def test_the_newest_goes_first_and_those_that_came_back_last() -> None:
    bench = Bench()
    for name, order, returned in (("a", 1, False), ("d", 4, True), ("b", 2, False), ("c", 3, False)):
        bench.hold(name, order, returned=returned)
    assert bench.victims() == ["c", "b", "a", "d"]


def test_the_one_that_is_expected_to_stay_away_longest_goes_before_the_newest() -> None:
    bench = Bench()
    for name, order, wait in (("soon", 3, 0.1), ("late", 1, 60.0), ("unknown", 2, 0.0)):
        bench.hold(name, order, wait=wait)
    assert bench.victims() == ["late", "soon", "unknown"]


def test_who_waits_takes_from_newer_trajectories_only() -> None:
    bench = Bench()
    for name, order in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        bench.hold(name, order)
    assert bench.victims_of("b", 2) == ["d", "c"]
    assert bench.victims_of("new", 9) == []


def test_where_nothing_runs_all_may_be_taken_the_own_last() -> None:
    bench = Bench()
    for name, order in (("a", 1), ("b", 2), ("c", 3)):
        bench.hold(name, order)
    assert bench.victims_of("b", 2, idle=True) == ["c", "a", "b"]


def test_those_that_stay_away_for_long_keep_half_of_the_pool_from_newer_ones() -> None:
    bench = Bench(num_blocks=101)
    for order in range(4):
        bench.hold(f"{order}", order, count=20, wait=LONG_WAIT)
    assert bench.victims_of("new", 9) == ["3", "2"], "60 of 100 blocks, then 40"
    for order in (3, 2):
        bench.holds.returned(bench.sequence(str(order), order))
    assert bench.victims_of("new", 9) == [], "who is back is not away"


def test_a_short_absence_gives_nothing_to_newer_ones() -> None:
    bench = Bench(num_blocks=101)
    for order in range(4):
        bench.hold(f"{order}", order, count=20, wait=LONG_WAIT / 2)
    assert bench.victims_of("new", 9) == []


def test_blocks_that_siblings_share_are_held_until_the_last_lets_go() -> None:
    bench = Bench()
    blocks = bench.hold("a", 1, count=3)
    bench.pool.acquire(blocks)
    bench.holds.begin(bench.sequence("b", 2), blocks)
    bench.pool.release(blocks)
    assert bench.holds.num_blocks == 3, "b had them from a"
    bench.holds.end("a")
    assert bench.pool.num_used == 3
    bench.holds.end("b")
    assert bench.pool.num_used == 0


def test_a_second_hold_of_one_trajectory_takes_the_place_of_the_first() -> None:
    bench = Bench()
    bench.hold("a", 1, count=3)
    again = bench.hold("a", 1, count=2)
    assert len(bench.holds) == 1
    assert bench.pool.num_used == 2
    assert bench.pool.references(again).tolist() == [1, 1]


# In the engine.


def turn(name: str, ids: Any, max_tokens: int = 10, **fields: Any) -> Request:
    """A turn of the trajectory that its name begins with."""
    return ask(name, ids, max_tokens, **{"trajectory": name[0], "goes_on": True} | fields)


def following(request: Request, completion: Completion, observation: int = 5, **changes: Any) -> Request:
    seen = np.arange(1, observation + 1, dtype=np.int32)
    ids = np.concatenate((request.token_ids, completion.token_ids, seen))
    return replace(request, id=f"{request.id}+", token_ids=ids, **changes)


def old_blocks(request: Request) -> int:
    """Tokens of whole blocks that a turn left behind, when its last token was sampled and not computed."""
    return (len(request.token_ids) + request.max_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def churn(host: Host, blocks: int) -> None:
    """Strangers, one at a time, that go through so many blocks of the pool."""
    for i in range(blocks // 4):
        host.run(ask(f"stranger{len(host.ended)}", [i % 400 + 1] * 60, 4, order=50 + i))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("length", [38, 39, 40, 54, 55])
def test_the_next_turn_finds_every_whole_block_whoever_passed_meanwhile(
    make_host: MakeHost, length: int, held: bool
) -> None:
    host = make_host(runner={"num_blocks": 16})
    first = turn("a", length, 10, goes_on=held)
    ended = host.run(first)["a"]
    churn(host, 40)
    second = following(first, ended, goes_on=False)
    again = host.run(second)[second.id]
    assert again.cached_tokens == (old_blocks(first) if held else 0)
    assert again.cached_tokens + again.computed_tokens == len(second.token_ids)
    assert_same(again, solo(second))
    assert host.pool.num_used == 0, "the last turn asked for no hold"


def test_what_is_held_is_told(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 32})
    host.run(turn("a", 40, 10), turn("b", 40, 10))
    stats = host.engine.stats()
    assert (stats.kv_holds, stats.blocks_held, stats.blocks_used) == (2, 6, 6)
    assert not host.engine.has_work
    host.engine.release_kv(("a", "nobody"))
    assert (host.engine.stats().kv_holds, host.engine.stats().blocks_used) == (1, 3)
    host.engine.release_kv("b")
    assert host.engine.stats().kv_holds_dropped_total == 0


def test_the_next_turn_hashes_only_what_is_new(make_host: MakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host()
    first = turn("a", 100, 10)
    second = following(first, host.run(first)["a"])
    hashed = []
    monkeypatch.setattr(sequences, "block_key", lambda *args: hashed.append(args) or block_key(*args))
    host.run(second)
    whole = (len(second.token_ids) + len(host.ended[second.id].token_ids) - 1) // BLOCK_SIZE
    assert len(hashed) == whole - old_blocks(first) // BLOCK_SIZE
    assert_same(host.ended[second.id], solo(second))
    host.engine.release_kv("a")


def test_a_turn_that_does_not_go_on_from_the_last_one_takes_nothing_from_it(make_host: MakeHost) -> None:
    host = make_host()
    host.run(turn("a", range(1, 101), 10))
    other = turn("a2", [*range(1, 40), 7, *range(41, 120)], 10, goes_on=False)
    assert host.run(other)["a2"].cached_tokens == 32
    assert_same(host.ended["a2"], solo(other))
    assert host.pool.num_used == 0


def test_a_turn_of_less_than_a_block_holds_nothing(make_host: MakeHost) -> None:
    host = make_host()
    host.run(turn("a", 5, 5))
    assert host.pool.num_used == 0
    host.engine.release_kv("a")


def test_a_running_request_takes_held_blocks_before_anybody_is_preempted(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 16})
    for name, order in (("a", 1), ("b", 2)):
        host.run(turn(name, 40, 10, order=order))
    assert host.pool.num_free == 9
    host.run(ask("runs", 40, 150, order=9))
    stats = host.engine.stats()
    assert (stats.kv_holds_dropped_total, stats.preemptions_total) == (1, 0)
    assert list(host.scheduler.holds._by_key) == ["a"], "the newer one gave way, though what ran was newer still"
    host.engine.release_kv("a")


def test_only_when_nothing_is_held_is_anybody_preempted(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 16})
    host.run(turn("a", 40, 10))
    requests = [ask("b", 40, 90, order=1), ask("c", 40, 90, order=2)]
    ended = host.run(*requests)
    stats = host.engine.stats()
    assert stats.kv_holds_dropped_total == 1
    assert stats.preemptions_total == ended["c"].preemptions >= 1
    for request in requests:
        assert_same(ended[request.id], solo(request))


def test_a_new_trajectory_waits_for_what_an_older_one_holds_while_anything_runs(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 16})
    host.run(turn("a", 150, 10, order=1))
    host.add(ask("runs", 10, 20, order=2), ask("new", 100, 3, order=3))
    while "runs" not in host.ended:
        assert host.engine.stats().kv_holds_dropped_total == 0
        host.step()
    assert "new" in host.run(), "nothing else ran"
    assert host.engine.stats().kv_holds_dropped_total == 1


def test_a_returning_turn_takes_what_newer_trajectories_hold(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 16})
    old, new = turn("a", 60, 5, order=1), turn("b", 90, 5, order=2)
    ended = host.run(old, new)
    host.add(ask("runs", 10, 60, order=0))
    host.step()
    second = following(old, ended["a"], observation=80, goes_on=False)
    host.add(second)
    host.step(2)
    assert host.engine.stats().running == 2
    assert host.engine.stats().kv_holds_dropped_total == 1
    assert host.run()[second.id].cached_tokens == 64
    assert_same(host.ended[second.id], solo(second))


def test_nothing_is_dropped_that_would_not_make_enough_room(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 16})
    host.run(turn("a", 20, 5, order=8))
    host.add(ask("runs", 150, 40, order=0), ask("large", 100, 3, order=1))
    host.step(10)
    assert host.engine.stats().kv_holds_dropped_total == 0
    host.run()
    host.engine.release_kv("a")


def test_who_reads_no_hits_does_not_wait_for_its_own_hold(make_host: MakeHost) -> None:
    """A score computes its prompt anew: what its trajectory holds is in its way."""
    host = make_host(runner={"num_blocks": 8})
    first = turn("a", 70, 10)
    ended = host.run(first)["a"]
    second = following(first, ended, prompt_logprobs=True)
    assert host.run(second)[second.id].finish_reason == "length"
    host.engine.release_kv("a")


@pytest.mark.parametrize("reason", ["abort_client", "abort_weight_update", "turn_deadline"])
def test_only_a_deadline_leaves_a_trajectory_that_goes_on(make_host: MakeHost, reason: Any) -> None:
    host = make_host()
    request = turn("a", 40, 30)
    host.add(request)
    host.step(6)
    host.engine.abort("a", reason)
    host.step()
    assert host.engine.stats().kv_holds == (1 if reason == "turn_deadline" else 0)
    if reason == "turn_deadline":
        second = following(request, host.ended["a"], goes_on=False)
        assert host.run(second)[second.id].cached_tokens == 32
        assert_same(host.ended[second.id], solo(second))


def test_a_turn_that_failed_leaves_nothing_to_hit(make_host: MakeHost) -> None:
    host = make_host(runner={"bad_id": 77})
    host.run(turn("a", [5] * 40 + [77], 10))
    assert host.engine.stats().kv_holds == 0


def test_new_weights_end_every_hold_and_wait_for_none(make_host: MakeHost) -> None:
    host = make_host()
    first = turn("a", 40, 10)
    ended = host.run(first)["a"]
    assert host.pool.num_used == 3
    host.engine.commit(lambda: None, 2)
    assert (host.engine.stats().kv_holds, host.pool.num_used) == (0, 0)
    assert host.engine.stats().kv_holds_dropped_total == 0, "they were not dropped for want of blocks"
    second = following(first, ended, goes_on=False)
    assert host.run(second)[second.id].cached_tokens == 0


def test_a_turn_that_ends_under_other_weights_than_its_kv_is_not_held(make_host: MakeHost) -> None:
    host = make_host()
    host.add(turn("a", 40, 30))
    host.step(4)
    host.engine.commit(lambda: None, 2)
    host.run()
    assert host.engine.stats().kv_holds == 0


def test_without_a_prefix_cache_nothing_is_held(make_host: MakeHost) -> None:
    host = make_host(prefix_cache=False)
    host.run(turn("a", 40, 10))
    assert host.engine.stats().kv_holds == 0


def test_siblings_hold_their_prompt_once(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 32})
    prompt = range(1, 49)
    host.run(
        *(
            ask(f"{i}", prompt, 20, group="g", trajectory=f"{i}", goes_on=True, params=SamplingParams(seed=i))
            for i in range(4)
        )
    )
    assert host.engine.stats().kv_holds == 4
    assert host.pool.num_used == 3 + 4
    host.engine.release_kv("0")
    assert host.pool.num_used == 3 + 3
    host.engine.release_kv("123")


def test_a_duplicate_whose_twin_is_evicted_is_found_by_its_own_turn(make_host: MakeHost) -> None:
    """Two requests that compute one prompt at once: the second one's blocks have no name of their own."""
    host = make_host(runner={"num_blocks": 16}, max_step_tokens=256)
    first, twin = ask("twin", range(1, 49), 2), turn("a", range(1, 49), 40)
    host.add(first, twin)
    while "twin" not in host.ended:
        host.step()
    host.add(ask("stranger", 120, 2, order=3))
    ended = host.run()["a"]
    second = following(twin, ended, goes_on=False)
    assert host.run(second)[second.id].cached_tokens == old_blocks(twin)
    assert_same(host.ended[second.id], solo(second))


def test_prompt_tokens_that_a_preemption_computes_again_are_counted_again(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10}, max_step_tokens=64)
    requests = [ask("a", 16, 100, order=1), ask("b", 64, 60, order=2)]
    ended = host.run(*requests)
    assert ended["b"].preemptions >= 1
    assert ended["a"].computed_tokens == 16
    assert ended["b"].computed_tokens > 64
    stats = host.engine.stats()
    assert stats.computed_prompt_tokens_total == sum(c.computed_tokens for c in ended.values())


# Whole trajectories at random: every turn ends as it would alone, whatever is held or dropped meanwhile.


@cache
def alone(ids: bytes, max_tokens: int, seed: int) -> Completion:
    request = ask("alone", np.frombuffer(ids, np.int32), max_tokens, params=SamplingParams(seed=seed))
    return solo(request, max_context=400, runner={"num_blocks": 64})


class TrajectoryMachine(RuleBasedStateMachine):
    """Trajectories start, wait for their environment, return, end or are cut; commits replace weights by equal ones."""

    host: Host

    @initialize(
        lazy=st.booleans(), overlap=st.booleans(), num_blocks=st.sampled_from([14, 20, 64]), slots=st.integers(1, 4)
    )
    def begin(self, lazy: bool, overlap: bool, num_blocks: int, slots: int) -> None:
        options: dict[str, Any] = {"max_running": slots, "max_step_tokens": 24, "max_context": 200}
        self.host = Host(lazy=lazy, overlap=overlap, runner={"num_blocks": num_blocks}, **options)
        self.requests: dict[str, Request] = {}
        self.away: dict[str, tuple[Request, Completion]] = {}
        self.aborted: set[str] = set()
        self.version = 1

    def _add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.host.add(request)

    @rule(prompt=st.integers(1, 60), tokens=st.integers(1, 25), grouped=st.booleans(), wait=st.sampled_from([0.0, 1.0]))
    def start(self, prompt: int, tokens: int, grouped: bool, wait: float) -> None:
        number = len(self.requests)
        self._add(
            ask(
                f"{number}.0",
                range(1, 41 if grouped else prompt + 1),
                tokens,
                order=number,
                group="g" if grouped else "",
                params=SamplingParams(seed=number % 5),
                trajectory=f"{number}",
                goes_on=True,
                expected_wait=wait,
            )
        )

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for completion in self.host.step(times):
            if not completion.finish_reason.startswith("abort"):
                self.away[completion.request_id] = self.requests[completion.request_id], completion

    @precondition(lambda self: self.away)
    @rule(data=st.data(), seen=st.integers(1, 20), tokens=st.integers(1, 20))
    def come_back(self, data: st.DataObject, seen: int, tokens: int) -> None:
        request, completion = self.away.pop(data.draw(st.sampled_from(sorted(self.away))))
        ids = np.concatenate((request.token_ids, completion.token_ids, np.arange(100, 100 + seen, dtype=np.int32)))
        if len(ids) + tokens < 200:
            name, _, index = request.id.partition(".")
            self._add(replace(request, id=f"{name}.{int(index) + 1}", token_ids=ids, max_tokens=tokens, group=""))
        else:
            self.host.engine.release_kv((request.trajectory,))

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request, _ = self.away.pop(data.draw(st.sampled_from(sorted(self.away))))
        self.host.engine.release_kv((request.trajectory,))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        live = sorted(request.id for request in self.host.engine.live_requests())
        if live:
            name = data.draw(st.sampled_from(live))
            self.host.engine.abort(name, "abort_client")
            self.host.engine.release_kv((self.requests[name].trajectory,))
            self.aborted.add(name)

    @rule()
    def commit(self) -> None:
        self.version += 1
        self.host.engine.commit(lambda: None, self.version)
        assert self.host.engine.stats().kv_holds == 0

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        (self.host.engine.hold if held else self.host.engine.release)()

    @precondition(lambda self: self.host.scheduler.table.num_running)
    @rule()
    def preempt(self) -> None:
        self.host.engine.drain()
        if self.host.scheduler.table.num_running:
            self.host.engine._preempt(self.host.scheduler.newest_running())

    @invariant()
    def only_the_away_and_the_waiting_hold(self) -> None:
        holds = self.host.scheduler.holds._by_key
        running = {sequence.request.trajectory for sequence in self.host.scheduler.table.running()}
        assert not running & holds.keys()
        assert self.host.engine.stats().blocks_held <= self.host.engine.stats().blocks_used

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.engine.release()
        self.host.run()
        self.host.engine.release_kv([request.trajectory for request in self.requests.values()])
        self.host.check_empty()
        assert set(self.host.ended) == set(self.requests)
        for name, request in self.requests.items():
            ended = self.host.ended[name]
            expected = alone(request.token_ids.tobytes(), request.max_tokens, request.params.seed)
            count = len(ended.token_ids)
            assert ended.token_ids.tolist() == expected.token_ids[:count].tolist()
            assert name in self.aborted or ended.finish_reason == expected.finish_reason
            assert ended.cached_tokens % BLOCK_SIZE == 0
        total = self.host.engine.stats().computed_prompt_tokens_total
        assert total == sum(completion.computed_tokens for completion in self.host.ended.values())


TestTrajectories = TrajectoryMachine.TestCase
TestTrajectories.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
