"""Thousands of steps with requests that come, stop and are aborted at random: overlap on gives what overlap off gives.

TABLE's logits depend on the last token alone, whatever the batch, so that tokens can be compared bit by bit.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.request import Completion, Request, SamplingParams, StopRule
from engine.start.build import load_engine
from tests.engine.serve import ask, ids
from tests.rigs import write_table

STEPS = 10_000
VOCAB = 512


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = np.random.default_rng(0).normal(0, 2, (32, VOCAB)).astype(np.float32)
    states = {token: token % 32 for token in range(VOCAB)}
    return write_table(tmp_path_factory.mktemp("stress"), rows, states, max_context=512, hidden=256, head_dim=128)


def request(number: int) -> Request:
    """The same for the same number: of a group of six or alone, plain or filtered, that stops early or does not."""
    chance = random.Random(number)
    group = f"g{number // 6}" if number // 6 % 2 else ""
    prompt = ids(number // 6, 96) if group else ids(number, chance.randint(1, 120))
    params = SamplingParams(temperature=chance.choice([0.0, 0.7, 1.0]), seed=number, top_k=chance.choice([0, 0, 0, 20]))
    stop = StopRule(ids=frozenset(chance.sample(range(VOCAB), chance.choice([0, 4]))))
    return ask(f"r{number}", prompt, chance.randint(1, 200), group=group, params=params, stop=stop)


def run(path: Path, *, overlap: bool) -> tuple[dict[str, Completion], set[str], int]:
    """Completions by name, those that were to be aborted, and the preemptions."""
    config = EngineConfig(max_running=24, max_step_tokens=128, max_context=400, overlap=overlap)
    loaded = load_engine(path, config, dtype="bfloat16", device="cuda", num_blocks=120)
    engine = loaded.engine
    ended: dict[str, Completion] = {}
    aborted: set[str] = set()
    number = 0
    for step in range(STEPS):
        # With overlap a request ends a step later, so the two runs see other neighbours; requests are by number alone.
        while len(engine.live_requests()) < 40:
            engine.add(request(number))
            number += 1
        if step % 7 == 0:
            name = f"r{random.Random(step).randrange(max(0, number - 60), number)}"
            aborted.add(name)
            engine.abort(name, "abort_client")
        for completion in engine.step():
            assert completion.request_id not in ended
            ended[completion.request_id] = completion
    for left in engine.live_requests():
        aborted.add(left.id)
        engine.abort(left.id, "abort_client")
    while engine.has_work:
        ended |= {completion.request_id: completion for completion in engine.step()}
    assert len(ended) == number
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.nonfinite_total) == (0, 0, 0, 0)
    return ended, aborted, stats.preemptions_total


@pytest.mark.stress
def test_ten_thousand_steps_with_and_without_overlap(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cuda.input.LEAST_SAVED", 0)  # groups are small, and are to read their prompts together
    on, aborted_on, preempted = run(table, overlap=True)
    off, aborted_off, _ = run(table, overlap=False)
    assert preempted > 0
    both = on.keys() & off.keys()
    assert len(both - aborted_on - aborted_off) > 500  # 722 were seen: the pool is short, so that few end in time
    for name in both:
        count = min(len(on[name].token_ids), len(off[name].token_ids))
        assert np.array_equal(on[name].token_ids[:count], off[name].token_ids[:count]), name
        found, expected = (run[name].logprobs["processed"][:count] for run in (on, off))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        if name not in aborted_on | aborted_off:
            assert len(on[name].token_ids) == len(off[name].token_ids), name
            assert on[name].finish_reason == off[name].finish_reason
