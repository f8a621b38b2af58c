"""The eleven rules that keep an overlapped step correct, one test each or more, eager and lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.config import BLOCK_SIZE
from engine.errors import RequestTooLarge
from engine.request import SamplingParams, StopRule
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.slots import SlotTable
from tests.engine.host import Host, ask, assert_same, solo
from tests.fake_runner import POISON

MakeHost = Callable[..., Host]
WIDE = {"vocab_size": 1 << 20}
"""So many ids that none is sampled twice."""


def test_rule_01_a_token_feeds_the_next_step_before_the_host_knows_it(make_host: MakeHost) -> None:
    host = make_host()
    request = ask("a", 20, 6)
    assert_same(host.run(request)["a"], solo(request))
    launched = host.runner.events.index(("launch", 1))
    assert launched < host.runner.events.index(("wait", 0)), "step 1 was launched after step 0 had been read"
    for plan in host.runner.plans[1:]:
        assert plan.num_decode == 1
        assert len(plan.token_ids) == 0, "the host named a token that was still in flight"


def test_rule_01_only_the_last_chunk_writes_last_token(make_host: MakeHost) -> None:
    host = make_host(max_running=2, max_step_tokens=8)
    request = ask("a", 20, 3)
    assert_same(host.run(request)["a"], solo(request))
    assert [plan.samples.tolist() for plan in host.runner.plans] == [[False], [False], [True], [True], [True]]


def test_rule_02_neither_plans_nor_results_share_memory_with_what_changes(make_host: MakeHost) -> None:
    """The runner checks that a plan is unchanged when its step is read, and overwrites results at the next one."""
    host = make_host()
    requests = [ask(name, 10 + i, 20, top_logprobs=2) for i, name in enumerate("abcd")]
    ended = host.run(*requests)
    for request in requests:
        assert_same(ended[request.id], solo(request))
    table = host.scheduler.table
    arrays = [value for value in vars(table).values() if isinstance(value, np.ndarray)]
    for plan in host.runner.plans:
        for name in ("slots", "context_lens", "query_lens", "token_ids", "block_indptr", "block_ids", "samples"):
            assert not any(np.shares_memory(getattr(plan, name), array) for array in arrays), name


def test_rule_03_the_row_after_a_stop_is_dropped_though_its_slot_has_a_new_tenant(make_host: MakeHost) -> None:
    host = make_host(max_running=1, runner=WIDE)
    first = ask("a", 20, 10)
    stop = int(solo(first, runner=WIDE).token_ids[3])
    first = ask("a", 20, 10, stop=StopRule(ids=frozenset({stop})))
    second = ask("b", 20, 5)
    ended = host.run(first, second)
    assert ended["a"].finish_reason == "stop"
    assert ended["a"].stop == stop
    assert_same(ended["a"], solo(first, runner=WIDE))
    assert_same(ended["b"], solo(second, runner=WIDE))
    events, starts = host.runner.events, [plan.step for plan in host.runner.plans if plan.starts]
    assert events.index(("launch", starts[1])) < events.index(("wait", starts[1] - 1)), "the old row was not in flight"
    assert host.engine.stats().wasted_rows_total == 1


def test_rule_03_blocks_are_free_only_after_the_last_step_that_has_them(make_host: MakeHost) -> None:
    host = make_host(prefix_cache=False, runner=WIDE)
    request = ask("a", 20, 10)
    stop = int(solo(request, runner=WIDE).token_ids[3])
    host.add(ask("a", 20, 10, stop=StopRule(ids=frozenset({stop}))))
    while "a" not in host.ended:
        host.step()
    assert host.pool.num_used == 2, "the step in flight still writes them"
    host.step()
    assert host.pool.num_used == 0


def test_rule_04_max_tokens_is_known_ahead(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=64)
    host.run(*(ask(name, 20, tokens) for name, tokens in (("a", 1), ("b", 2), ("c", 7))))
    stats = host.engine.stats()
    assert stats.wasted_rows_total == 0
    assert stats.sampled_tokens_total == 10
    assert sum(plan.num_rows for plan in host.runner.plans) == 10
    assert [plan.num_rows for plan in host.runner.plans] == [3, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("what", ["pause", "commit", "abort_started"])
def test_rule_04_the_pipe_is_drained_with_one_end_for_each(make_host: MakeHost, what: str) -> None:
    host = make_host()
    requests = [ask("a", 20, 4), ask("b", 20, 12), ask("c", 20, 12)]
    host.add(*requests)
    host.step(4)
    assert len(host.runner._pending) == 1, "no step was in flight"
    if what == "pause":
        host.engine.pause()
    elif what == "commit":
        host.engine.commit(lambda: None, 2)
    else:
        host.engine.abort_started("abort_weight_update")
    assert not host.runner._pending
    host.engine.resume()
    ended = host.run()
    assert set(ended) == {"a", "b", "c"}
    assert_same(ended["a"], solo(requests[0]))
    if what == "abort_started":
        assert ended["b"].finish_reason == "abort_weight_update"
        assert ended["b"].token_ids.tolist() == solo(requests[1]).token_ids[:4].tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("total", [31, 32, 33, 34, 47, 48, 49])
def test_rule_05_only_whole_computed_blocks_are_hit(make_host: MakeHost, overlap: bool, total: int) -> None:
    """Of `total` ids the last was sampled and has no KV; a stop leaves a row behind that computes it all the same."""
    host = make_host(overlap=overlap, runner=WIDE)
    first = ask("a", 20, 30)
    ids = solo(first, runner=WIDE).token_ids[: total - 20].tolist()
    first = ask("a", 20, 30, stop=StopRule(ids=frozenset({ids[-1]})))
    reply = host.run(first)["a"]
    assert reply.token_ids.tolist() == ids
    published = (total - 1) // BLOCK_SIZE
    turn = ask("b", [*first.token_ids, *ids, *range(1, 20)], 10)
    second = host.run(turn)["b"]
    assert second.cached_tokens == published * BLOCK_SIZE
    assert_same(second, solo(turn, runner=WIDE))


def test_rule_05_nothing_is_published_at_launch(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=80)
    host.add(ask("a", 40, 2), ask("b", [9] * 40, 5))
    host.step()
    assert host.runner.events == [("launch", 0)]
    assert not host.pool._by_key
    host.step()
    assert len(host.pool._by_key) == 4


def test_rule_05_blocks_of_sampled_ids_are_published_when_their_turn_ends(make_host: MakeHost) -> None:
    host = make_host()
    request = ask("a", 20, 60)
    host.add(request)
    host.step(45)
    assert len(host.pool._by_key) == 1, "more than the prompt's, whose row still runs"
    host.engine.abort("a", "abort_client")
    reply = host.run()["a"].token_ids.tolist()
    assert len(host.pool._by_key) == (20 + len(reply) - 1) // BLOCK_SIZE == 3


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
def test_rule_06_the_last_id_is_always_computed_anew(make_host: MakeHost, length: int) -> None:
    host = make_host()
    requests = [ask(name, range(1, length + 1), 8, params=SamplingParams(seed=5)) for name in "abc"]
    for request in requests:
        ended = host.run(request)
        assert_same(ended[request.id], solo(request))
    hits = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert [ended[name].cached_tokens for name in "abc"] == [0, hits, hits]


def test_rule_06_named_and_shared_blocks_never_change(make_host: MakeHost) -> None:
    """The runner raises on such a write; this looks at the contents."""
    host = make_host(runner={"num_blocks": 24})
    prompt = list(range(1, 41))
    host.add(*(ask(f"{i}", prompt[: 20 + i], 30, params=SamplingParams(seed=i)) for i in range(12)))
    seen: dict[bytes, bytes] = {}
    while host.engine.has_work:
        host.step()
        for key, block in host.pool._by_key.items():
            contents = host.runner.kv[block].tobytes()
            assert POISON not in host.runner.kv[block]
            assert seen.setdefault(key, contents) == contents
    assert len(seen) > 12


def test_rule_07_a_lack_of_blocks_costs_a_bubble_then_the_newest_is_preempted(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10})
    requests = [ask("old", 16, 96, order=1), ask("new", 16, 96, order=2)]
    ended = host.run(*requests)
    for request in requests:
        assert_same(ended[request.id], solo(request))
    assert ended["old"].preemptions == 0
    assert ended["new"].preemptions >= 1
    stats = host.engine.stats()
    assert stats.preemptions_total == ended["new"].preemptions
    assert stats.bubbles_total == stats.preemptions_total
    assert stats.running == stats.waiting == stats.blocks_used == 0


def test_rule_07_a_bubble_alone_may_be_enough(make_host: MakeHost) -> None:
    """What the step in flight ends is free before anybody is preempted."""
    host = make_host(runner={"num_blocks": 5}, prefix_cache=False)
    short, long = ask("short", 16, 9), ask("long", 24, 20)
    # `long` needs its third block at position 32, the step after `short` has its last token launched.
    ended = host.run(short, long)
    assert_same(ended["short"], solo(short))
    assert_same(ended["long"], solo(long))
    stats = host.engine.stats()
    assert stats.preemptions_total == 0
    assert stats.bubbles_total == 1


def test_rule_07_new_work_never_preempts(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10})
    host.add(ask("running", 100, 30, order=9))
    host.step(2)
    first = ask("waiting", 60, 5, order=1)
    ended = host.run(first)
    assert list(ended) == ["running", "waiting"]
    assert host.engine.stats().preemptions_total == 0


def test_rule_07_what_can_never_fit_is_refused(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 10})
    with pytest.raises(RequestTooLarge):
        host.add(ask("a", 100, 46))
    exact = ask("b", 100, 45)
    assert_same(host.run(exact)["b"], solo(exact))


def test_rule_08_the_dummy_block_is_never_handed_out(make_host: MakeHost) -> None:
    """Padding is the runner's; the host's part is that no row ever names its block, nor a slot past the last."""
    host = make_host(runner={"num_blocks": 12})
    host.run(*(ask(f"{i}", 30, 20) for i in range(9)))
    for plan in host.runner.plans:
        assert plan.block_ids.min() >= 1
        assert plan.slots.max() < host.config.max_running
    assert (host.runner.kv[0] == POISON).all()


@pytest.mark.parametrize("option", ["bad_id", "empty_id"])
def test_rule_09_a_flagged_row_is_an_error_of_its_own(make_host: MakeHost, option: str) -> None:
    good = [ask("a", 20, 12), ask("c", 25, 12)]
    bad = ask("b", 33, 12)
    poison = int(solo(bad, runner=WIDE).token_ids[4])
    host = make_host(runner=WIDE | {option: poison})
    ended = host.run(good[0], bad, good[1])
    for request in good:
        assert_same(ended[request.id], solo(request, runner=WIDE))
    assert ended["b"].finish_reason == "error"
    assert ended["b"].error is not None
    assert ended["b"].error.code == "numerical_error"
    assert ended["b"].token_ids.tolist() == solo(bad, runner=WIDE).token_ids[:5].tolist()
    assert len(ended["b"].logprobs["processed"]) == 5
    stats = host.engine.stats()
    assert stats.nonfinite_total == 1
    assert stats.wasted_rows_total == 1, "the next step had been launched with the row"


def test_rule_09_blocks_of_a_failed_row_are_not_hit(make_host: MakeHost) -> None:
    host = make_host(runner={"bad_id": 7})
    prompt = [*range(100, 140), 7, *range(200, 210)]
    assert host.run(ask("a", prompt, 5))["a"].finish_reason == "error"
    again = host.run(ask("b", prompt[:40], 5))["b"]
    assert again.cached_tokens == 0
    assert again.finish_reason == "length"


def group(count: int, length: int = 40, **fields: Any) -> list[Any]:
    return [
        ask(
            f"g{i}",
            range(1, length + 1),
            6,
            group="g",
            order=i,
            params=SamplingParams(seed=3, sample_index=i),
            **fields,
        )
        for i in range(count)
    ]


def test_rule_10_a_prompt_shared_by_a_group_is_computed_once(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    requests = group(6)
    ended = host.run(*requests)
    for request in requests:
        assert_same(ended[request.id], solo(request))
    assert [ended[r.id].cached_tokens for r in requests] == [0, 32, 32, 32, 32, 32]
    stats = host.engine.stats()
    assert stats.computed_prompt_tokens_total == 40 + 5 * 8
    assert stats.cached_prompt_tokens_total == 5 * 32


def test_rule_10_siblings_start_together_once_the_leader_is_done(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=48)
    host.run(*group(6))
    starts = [len(plan.starts) for plan in host.runner.plans if plan.starts]
    assert starts == [1, 5], "the siblings came one after the other"


@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_rule_10_the_next_sibling_leads_when_the_leader_is_gone(make_host: MakeHost, end: str) -> None:
    host = make_host(max_step_tokens=16, runner={"bad_id": 499})
    requests = group(3, 60)
    if end == "fail":
        ids = requests[0].token_ids.copy()
        ids[-1] = 499
        requests[0] = ask("g0", ids, 6, group="g")
    host.add(*requests)
    host.step(3)
    assert [plan.num_rows for plan in host.runner.plans] == [1, 1, 1], "siblings did not wait"
    if end == "abort":
        host.engine.abort("g0", "abort_client")
    elif end == "preempt":
        host.engine.drain()
        host.engine._preempt(host.scheduler.newest_running())
    ended = host.run()
    for request in requests[1:]:
        assert_same(ended[request.id], solo(request))
    expected = {"abort": "abort_client", "fail": "error", "preempt": "length"}[end]
    assert ended["g0"].finish_reason == expected
    assert host.engine.stats().running == 0


def test_rule_10_nobody_waits_without_a_cache_or_a_whole_block(make_host: MakeHost) -> None:
    host = make_host(prefix_cache=False, max_step_tokens=160)
    host.run(*group(4))
    assert host.runner.plans[0].num_rows == 4
    short = make_host()
    short.run(*group(4, 12))
    assert short.runner.plans[0].num_rows == 4


def test_rule_10_a_returning_turn_goes_before_a_new_trajectory(make_host: MakeHost) -> None:
    host = make_host(max_running=1)
    host.add(ask("running", 20, 5, order=0))
    host.step()
    host.add(ask("new", 20, 3, order=7), ask("newer", 20, 3, order=8), ask("returning", 20, 3, order=2))
    assert list(host.run()) == ["running", "returning", "new", "newer"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [10, 64])
def test_rule_11_penalty_counts_survive_overlap_and_preemption(
    make_host: MakeHost, overlap: bool, num_blocks: int
) -> None:
    """The runner keeps its counts per slot from `SlotStart` and from what it samples; they change the tokens."""
    host = make_host(overlap=overlap, runner={"num_blocks": num_blocks})
    sampled = np.arange(16) > 9
    requests = [
        ask(name, 16, 90, sampled=sampled, params=SamplingParams(seed=i, presence_penalty=0.5))
        for i, name in enumerate("ab")
    ]
    ended = host.run(*requests)
    for request in requests:
        assert_same(ended[request.id], solo(request))
    assert (ended["b"].preemptions > 0) == (num_blocks == 10)
    plain = ask("a", 16, 90, params=SamplingParams(seed=0))
    assert solo(plain).token_ids.tolist() != ended["a"].token_ids.tolist()


# The rig itself: an engine that breaks a rule must not pass.


def _break(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "blocks freed while a step has them":
        plan = Scheduler.plan

        def early(self: Scheduler, step: int) -> Any:
            self.step_done(step)
            return plan(self, step)

        monkeypatch.setattr(Scheduler, "plan", early)
    elif what == "the last block is hit too":

        def greedy(self: Scheduler, sequence: Any) -> list[int]:
            return self.pool.find(sequence.prefix_keys(len(sequence.ids) // BLOCK_SIZE, self.epoch))

        monkeypatch.setattr(Scheduler, "_hits", greedy)
    elif what == "rows told by slot":
        enter = SlotTable.enter

        def nameless(self: SlotTable, *args: Any) -> None:
            enter(self, *args)
            self.first_step[args[0].slot] = 0

        monkeypatch.setattr(SlotTable, "enter", nameless)
    elif what == "published when launched":
        decide = Scheduler.plan

        def hasty(self: Scheduler, step: int) -> Any:
            if (scheduled := decide(self, step)) is not None:
                for chunk in scheduled.chunks:
                    self.chunk_done(chunk)
            return scheduled

        monkeypatch.setattr(Scheduler, "plan", hasty)
    else:
        monkeypatch.setattr(BlockPool, "num_unheld", lambda _self, _blocks: 0)
        monkeypatch.setattr(BlockPool, "acquire", lambda _self, _blocks: None)


@pytest.mark.parametrize(
    "what",
    [
        "blocks freed while a step has them",
        "the last block is hit too",
        "rows told by slot",
        "published when launched",
        "hits are not held",
    ],
)
def test_the_rig_notices(monkeypatch: pytest.MonkeyPatch, make_bare_host: MakeHost, what: str) -> None:
    stops = StopRule(ids=frozenset(range(0, 512, 9)))
    requests = [
        ask(f"{i}", range(1, 33 + i % 3 * 16), 40, stop=stops, params=SamplingParams(seed=i)) for i in range(24)
    ]
    expected = {request.id: solo(request) for request in requests}
    _break(monkeypatch, what)
    with pytest.raises((AssertionError, ValueError, KeyError)):  # noqa: PT012 (whichever of the two notices)
        ended = make_bare_host(max_running=4, runner={"num_blocks": 20}).run(*requests)
        for request in requests:
            assert_same(ended[request.id], expected[request.id])
