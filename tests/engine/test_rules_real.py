"""The eleven rules of an overlapped step on the CPU runner with a real model, eager and lazy (test_rules.py: each in
every detail, on a runner that is a formula). The KV pool is NaN wherever nothing was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import BLOCK_SIZE
from engine.errors import RequestTooLarge
from engine.request import Completion, Request, SamplingParams, StopRule
from tests.engine.serve import ask, assert_equal, ids, load, serve
from tests.rigs import RandModel, script, write_rand, write_table


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("rules") / "rand", RandModel())


def seeded(
    name: str, prompt: Any, max_tokens: int, seed: int = 1, law: dict[str, Any] | None = None, **fields: Any
) -> Request:
    return ask(name, prompt, max_tokens, params=SamplingParams(seed=seed, **law or {}), **fields)


def alone(path: Path, request: Request) -> Completion:
    return serve(load(path, overlap=False), request)[request.id]


def test_rule_01_a_token_feeds_the_next_step_on_the_device(rand: Path, lazy: bool) -> None:
    """Chunks before a prompt's last write no token: the two prompts are cut at 16 ids."""
    requests = [seeded(str(i), ids(i, 40 + i), 20, i) for i in range(2)]
    loaded = load(rand, max_step_tokens=16, lazy=lazy)
    ended = serve(loaded, *requests)
    for request in requests:
        assert_equal(ended[request.id], alone(rand, request), 1e-4)


def test_rule_02_buffers_that_are_used_again_change_no_result(rand: Path, lazy: bool) -> None:
    loaded = load(rand, lazy=lazy)
    first = serve(loaded, seeded("first", ids(1, 20), 24, top_logprobs=3))["first"]
    assert first.top_ids is not None
    before = [array.copy() for array in (first.token_ids, first.logprobs["processed"], first.top_ids)]
    serve(loaded, *(seeded(f"{i}", ids(i, 30), 24, i, top_logprobs=3) for i in range(8)))
    for array, copy in zip((first.token_ids, first.logprobs["processed"], first.top_ids), before, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_rule_03_the_row_after_a_stop_is_not_the_next_tenants(rand: Path, lazy: bool) -> None:
    first = seeded("first", ids(1, 20), 30)
    stop = int(alone(rand, first).token_ids[5])
    first = seeded("first", ids(1, 20), 30, stop=StopRule(ids=frozenset({stop})))
    second = seeded("second", ids(2, 33), 30, 2)
    loaded = load(rand, max_running=1, lazy=lazy)
    ended = serve(loaded, first, second)
    assert ended["first"].finish_reason == "stop"
    assert loaded.engine.stats().wasted_rows_total == 1
    for request in (first, second):
        assert_equal(ended[request.id], alone(rand, request), 1e-4)


def test_rule_04_a_budget_wastes_no_row_and_a_drain_gives_each_one_end(rand: Path, lazy: bool) -> None:
    loaded = load(rand, lazy=lazy)
    engine = loaded.engine
    serve(loaded, *(seeded(f"{i}", ids(i, 20), 5 + i) for i in range(6)))
    assert engine.stats().wasted_rows_total == 0
    for i in range(6):
        engine.add(seeded(f"{i}", ids(i, 20), 50))
    for _ in range(4):
        assert not engine.step()
    engine.abort_started("abort_weight_update")
    ended = engine.step()
    assert sorted(completion.request_id for completion in ended) == sorted(map(str, range(6)))
    assert {len(completion.token_ids) for completion in ended} == {4}
    assert not engine.has_work


@pytest.mark.parametrize("reply", [15, 16, 17])
def test_rule_05_only_positions_with_kv_are_hit(rand: Path, lazy: bool, reply: int) -> None:
    loaded = load(rand, lazy=lazy)
    prompt = ids(3, 16)
    whole = np.concatenate((prompt, serve(loaded, seeded("a", prompt, reply))["a"].token_ids))
    turn = seeded("turn", np.concatenate((whole, ids(4, 20))), 8)
    again = serve(loaded, turn)["turn"]
    assert again.cached_tokens == (16 + reply - 1) // BLOCK_SIZE * BLOCK_SIZE, "the last sampled token has no KV"
    assert_equal(again, alone(rand, turn), 1e-4)


def test_rule_06_named_and_shared_blocks_are_never_written(rand: Path, lazy: bool) -> None:
    loaded = load(rand, max_running=3, max_step_tokens=40, num_blocks=40, lazy=lazy)
    engine, pool = loaded.engine, loaded.engine._scheduler.pool
    prompt = ids(5, 64)
    for i in range(9):
        engine.add(seeded(f"{i}", prompt[: 40 + 3 * i], 20, i))
    seen: dict[bytes, bytes] = {}
    while engine.has_work:
        engine.step()
        engine.drain()
        for key, block in pool._by_key.items():
            contents = loaded.kv.data[:, :, block].numpy().tobytes()
            assert seen.setdefault(key, contents) == contents
    assert len(seen) > 9


def test_rule_07_a_bubble_then_the_newest_is_preempted(rand: Path, lazy: bool) -> None:
    loaded = load(rand, num_blocks=10, lazy=lazy)
    requests = [seeded("old", ids(1, 16), 96, 1, order=1), seeded("new", ids(2, 16), 96, 2, order=2)]
    ended = serve(loaded, *requests)
    stats = loaded.engine.stats()
    assert (ended["old"].preemptions, ended["new"].preemptions) == (0, stats.preemptions_total)
    assert stats.bubbles_total == stats.preemptions_total > 0
    for request in requests:
        assert_equal(ended[request.id], alone(rand, request), 1e-4)
    with pytest.raises(RequestTooLarge):
        loaded.engine.add(ask("never", ids(3, 100), 46))


def test_rule_08_the_dummy_block_is_neither_read_nor_written(rand: Path, lazy: bool) -> None:
    loaded = load(rand, lazy=lazy)
    ended = serve(loaded, *(seeded(f"{i}", ids(i, 10 + i), 20, i) for i in range(12)))
    assert loaded.kv.data[:, :, 0].isnan().all()
    assert all(np.isfinite(completion.logprobs["processed"]).all() for completion in ended.values())


def test_rule_09_a_row_that_is_not_finite_ends_alone(tmp_path: Path, lazy: bool) -> None:
    rows, state_of = script(64, [(1, 2), (2, 3), (3, 1), (5, 6), (6, 7)])
    rows = rows.astype(np.float64)
    rows[state_of[6], 9] = 1e39
    path = write_table(tmp_path / "overflowing", rows, state_of)
    loaded = load(path, lazy=lazy)
    ended = serve(loaded, ask("good", [1], 12), ask("bad", [5], 12))
    assert ended["good"].token_ids.tolist() == [2, 3, 1] * 4
    assert ended["bad"].token_ids.tolist() == [6]
    assert ended["bad"].error is not None
    assert ended["bad"].error.code == "numerical_error"
    assert loaded.engine.stats().wasted_rows_total == 1, "the next step had been launched with the row"


def test_rule_10_a_prompt_that_a_group_shares_is_computed_once(rand: Path, lazy: bool) -> None:
    prompt = ids(6, 70)
    requests = [seeded(str(i), prompt, 12, law={"sample_index": i}, group="g") for i in range(4)]
    loaded = load(rand, lazy=lazy)
    ended = serve(loaded, *requests)
    assert loaded.engine.stats().computed_prompt_tokens_total == 70 + 3 * (70 - 64)
    assert len({tuple(completion.token_ids.tolist()) for completion in ended.values()}) == 4
    for request in requests:
        assert_equal(ended[request.id], alone(rand, request), 1e-4)


@pytest.mark.parametrize("num_blocks", [10, 64])
def test_rule_11_penalties_are_those_of_the_request_alone(rand: Path, lazy: bool, num_blocks: int) -> None:
    law = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    requests = [seeded(name, ids(i, 16), 90, i, law, sampled=np.arange(BLOCK_SIZE) > 9) for i, name in enumerate("ab")]
    ended = serve(load(rand, num_blocks=num_blocks, lazy=lazy), *requests)
    assert (ended["b"].preemptions > 0) == (num_blocks == 10)
    for request in requests:
        assert_equal(ended[request.id], alone(rand, request), 1e-4)
    plain = alone(rand, seeded("a", ids(0, 16), 90, 0))
    assert plain.token_ids.tolist() != ended["a"].token_ids.tolist()
