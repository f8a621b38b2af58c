"""Policy, seen through the plans that a `FakeRunner` gets: budget, order, admission, preemption, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import BLOCK_SIZE
from engine.request import Request, SamplingParams, StopRule
from tests.engine.host import Host, ask, assert_same, solo

MakeHost = Callable[..., Host]


def test_decode_rows_come_first_then_chunks_within_the_budget(make_host: MakeHost) -> None:
    host = make_host(max_running=8, max_step_tokens=24)
    host.add(ask("a", 10, 20), ask("b", 10, 20))
    host.step()
    host.add(ask("c", 60, 5))
    host.step(4)
    plans = host.runner.plans
    assert [plan.num_decode for plan in plans[:5]] == [0, 2, 2, 2, 3]
    assert [plan.query_lens.tolist() for plan in plans[:5]] == [[10, 10], [1, 1, 22], [1, 1, 22], [1, 1, 16], [1, 1, 1]]
    assert [plan.samples.tolist() for plan in plans[1:4]] == [[True, True, False]] * 2 + [[True, True, True]]


def test_a_prefill_that_has_begun_goes_on_before_a_new_one(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    host.add(ask("late", 40, 3, order=5))
    host.step()
    host.add(ask("early", 20, 3, order=1))
    host.step(2)
    assert [plan.slots.tolist() for plan in host.runner.plans[:3]] == [[0], [0], [0, 1]]


def test_running_requests_do_not_exceed_the_slots(make_host: MakeHost) -> None:
    host = make_host(max_running=3)
    requests = [ask(f"{i}", 5 + i, 4 + i) for i in range(10)]
    ended = host.run(*requests)
    assert max(plan.num_rows for plan in host.runner.plans) == 3
    for request in requests:
        assert_same(ended[request.id], solo(request))


def test_waiting_goes_by_order_then_by_arrival(make_host: MakeHost) -> None:
    host = make_host(max_running=1)
    host.add(*(ask(name, 5, 2, order=order) for name, order in (("a", 3), ("b", 1), ("c", 3), ("d", 2), ("e", 1))))
    assert list(host.run()) == ["b", "e", "d", "a", "c"]


def test_the_first_in_line_is_not_overtaken_by_a_smaller_one(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 11}, prefix_cache=False)
    host.add(ask("running", 80, 40, order=0))
    host.step()
    host.add(ask("large", 120, 3, order=1), ask("small", 10, 3, order=2))
    assert list(host.run()) == ["running", "large", "small"]


def test_admission_leaves_a_block_for_every_running_row(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 7})
    host.add(ask("a", 20, 10), ask("b", 20, 10), ask("c", 20, 10))
    host.step()
    assert host.engine.stats().running == 2, "c would take the two blocks that a and b may need next"
    host.run()
    assert host.engine.stats().preemptions_total == 0


def test_the_newest_trajectory_is_preempted_whatever_came_last(make_host: MakeHost) -> None:
    host = make_host(runner={"num_blocks": 13})
    requests = [ask("a", 16, 80, order=2), ask("b", 16, 80, order=9), ask("c", 16, 80, order=1)]
    ended = host.run(*requests)
    assert ended["b"].preemptions >= 1
    assert ended["c"].preemptions == 0
    for request in requests:
        assert_same(ended[request.id], solo(request))


def test_a_preempted_request_finds_its_own_blocks_again(make_host: MakeHost) -> None:
    """Its tail is evicted first; what is left of its head is hit, not computed."""
    host = make_host(runner={"num_blocks": 12}, max_step_tokens=64)
    host.run(ask("a", 16, 100, order=1), ask("b", 64, 60, order=2))
    assert host.ended["b"].preemptions == 1
    again = host.runner.plans[[i for i, plan in enumerate(host.runner.plans) if plan.starts][-1]]
    assert len(again.starts[0].token_ids) > 64
    assert again.context_lens[-1] >= 3 * BLOCK_SIZE
    assert host.ended["b"].cached_tokens == 0, "hits after the first admission are not the prompt's"


def test_scores_come_in_chunks_and_read_no_hits_but_publish(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    plain = ask("plain", range(1, 41), 3)
    scored = ask("scored", range(1, 41), 3, prompt_logprobs=True, logprob_modes=("raw", "processed"))
    only = ask("only", range(1, 41), 0, prompt_logprobs=True)
    for request in (plain, scored, only):
        assert_same(host.run(request)[request.id], solo(request))
    assert [host.ended[name].cached_tokens for name in ("plain", "scored", "only")] == [0, 0, 0]
    targets = np.concatenate([score.targets for plan in host.runner.plans[5:8] for score in plan.scores])
    assert targets.tolist() == [*range(2, 41), -1]
    scores = host.ended["only"].prompt_logprobs
    assert scores is not None
    assert np.isnan(scores["processed"]).tolist() == [True] + [False] * 39
    assert host.ended["only"].finish_reason == "length"
    later = make_host()
    later.run(only)
    later.run(ask("hit", range(1, 41), 3))
    assert later.ended["hit"].cached_tokens == 32


def test_a_prompt_of_one_id_is_scored(make_host: MakeHost) -> None:
    scores = make_host().run(ask("a", [5], 0, prompt_logprobs=True))["a"].prompt_logprobs
    assert scores is not None
    assert np.isnan(scores["processed"]).tolist() == [True]


def test_siblings_of_a_scored_leader_wait_for_its_blocks(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    prompt = range(1, 41)
    leader = ask("a", prompt, 2, group="g", prompt_logprobs=True)
    sibling = ask("b", prompt, 2, group="g")
    scored = ask("c", prompt, 2, group="g", prompt_logprobs=True)
    host.run(leader, sibling, scored)
    assert [host.ended[name].cached_tokens for name in "abc"] == [0, 32, 0]


def test_a_sibling_that_is_held_can_be_aborted(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    requests = [ask(f"{i}", range(1, 61), 4, group="g") for i in range(4)]
    host.add(*requests)
    host.step(2)
    assert host.engine.stats().waiting == 3
    host.engine.abort("2", "abort_client")
    ended = host.run()
    assert ended["2"].finish_reason == "abort_client"
    assert ended["2"].token_ids.tolist() == []
    assert [ended[name].finish_reason for name in "013"] == ["length"] * 3


def test_members_of_a_group_with_different_prompts_do_not_wait(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=256)
    host.run(*(ask(f"{i}", [i + 1] * 40, 4, group="g") for i in range(4)))
    assert host.runner.plans[0].num_rows == 4


def test_new_weights_let_held_siblings_go(make_host: MakeHost) -> None:
    host = make_host(max_step_tokens=16)
    host.add(*(ask(f"{i}", range(1, 61), 4, group="g") for i in range(3)))
    host.step(2)
    host.engine.commit(lambda: None, 2)
    host.step()
    assert host.runner.plans[-1].num_rows == 1
    ended = host.run()
    assert ended["1"].cached_tokens == 0, "hit the leader, who holds KV of the old weights"
    assert ended["2"].cached_tokens == 48, "the next sibling led"


# Random workloads. Whatever the schedule, each request ends as it would alone.

request_shapes = st.tuples(
    st.integers(1, 70),  # prompt
    st.integers(1, 40),  # max_tokens
    st.integers(0, 3),  # order
    st.sampled_from(["", "", "g", "h"]),  # group: shares its prompt with its like
    st.booleans(),  # prompt_logprobs
    st.sampled_from([0, 0, 3]),  # top_logprobs
    st.booleans(),  # stop ids
    st.booleans(),  # penalties
)
workloads = st.lists(request_shapes, min_size=1, max_size=7)


def build(shapes: list[Any]) -> list[Request]:
    requests = []
    for i, (prompt, max_tokens, order, group, scored, top, stops, penalties) in enumerate(shapes):
        base = [3, 1, 4, 1, 5, 9, 2, 6] * 9 if group == "g" else [*range(1, 73)]
        length = {"": prompt, "g": 37, "h": 48}[group]
        params = SamplingParams(seed=i, frequency_penalty=0.5 if penalties else 0.0)
        stop = StopRule(ids=frozenset(range(0, 512, 11))) if stops else StopRule()
        requests.append(
            ask(
                f"r{i}",
                base[:length],
                max_tokens,
                order=order,
                group=group,
                prompt_logprobs=scored,
                top_logprobs=top,
                stop=stop,
                params=params,
            )
        )
    return requests


def check_workload(host: Host, shapes: list[Any], arrivals: list[int]) -> None:
    """Requests arrive at the steps named; each ends as alone; no step exceeds its limits."""
    requests = build(shapes)
    waiting = sorted(zip([*arrivals, *[0] * len(requests)], requests, strict=False), key=lambda pair: pair[0])
    for step in range(2000):
        while waiting and waiting[0][0] <= step:
            host.add(waiting.pop(0)[1])
        host.step()
        if not waiting and not host.engine.has_work:
            break
    assert len(host.ended) == len(requests), "somebody starved"
    for request in requests:
        assert_same(host.ended[request.id], solo(request, runner={"num_blocks": 64}))
    for plan in host.runner.plans:
        assert plan.num_tokens <= host.config.max_step_tokens
        assert plan.num_rows <= host.config.max_running
    assert host.runner.max_in_flight <= (2 if host.config.overlap else 1)
    host.check_empty()


@given(
    shapes=workloads,
    arrivals=st.lists(st.integers(0, 30), max_size=7),
    overlap=st.booleans(),
    cache=st.booleans(),
    step_tokens=st.sampled_from([4, 17, 48, 300]),
    slots=st.sampled_from([1, 2, 4]),
    num_blocks=st.sampled_from([8, 11, 16, 64]),
    lazy=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_every_schedule_gives_each_request_what_it_gets_alone(
    shapes: list[Any],
    arrivals: list[int],
    overlap: bool,
    cache: bool,
    step_tokens: int,
    slots: int,
    num_blocks: int,
    lazy: bool,
) -> None:
    host = Host(
        lazy=lazy,
        overlap=overlap,
        prefix_cache=cache,
        max_step_tokens=step_tokens,
        max_running=slots,
        max_context=112,
        runner={"num_blocks": num_blocks},
    )
    check_workload(host, shapes, arrivals)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_steps_overlap_on_against_off(seed: int) -> None:
    """Random arrivals, aborts, stops and preemptions over a pool that is too small."""
    rng = np.random.default_rng(seed)
    hosts = [
        Host(lazy=True, overlap=overlap, max_running=6, runner={"num_blocks": 24}, max_step_tokens=24)
        for overlap in (True, False)
    ]
    tokens: list[dict[str, list[int]]] = []
    arrivals = [
        ask(
            f"{i}",
            [int(rng.integers(1, 4))] * int(rng.integers(1, 90)),
            int(rng.integers(1, 60)),
            order=i // 4,
            stop=StopRule(ids=frozenset(range(0, 512, 23))),
            params=SamplingParams(seed=i),
        )
        for i in range(4000)
    ]
    for host in hosts:
        rng = np.random.default_rng(seed + 100)
        queue = list(arrivals)
        while queue or host.engine.has_work:
            if queue and (host.engine.stats().waiting < 3 or not host.engine.has_work):
                host.add(queue.pop(0))
            if rng.random() < 0.01:
                host.engine.abort(str(int(rng.integers(0, 4000))), "abort_client")
            host.step()
        host.check_empty()
        tokens.append({k: c.token_ids.tolist() for k, c in host.ended.items() if c.finish_reason != "abort_client"})
    assert min(len(host.runner.plans) for host in hosts) > 10_000
    common = tokens[0].keys() & tokens[1].keys()
    assert len(common) > 3600
    assert all(tokens[0][k] == tokens[1][k] for k in common)
