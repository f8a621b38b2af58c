"""The comparison with transformers: all engines do the same work, and the verdict follows from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.comparison import FIELDS
from bench.cpu import (
    ONE_BY_ONE,
    OURS,
    PADDED,
    VOCAB,
    Ask,
    Generate,
    measure_mixed,
    measure_one,
    missed,
    mixed,
    one_by_one,
    padded,
    results,
    table,
    timed,
    with_engine,
    write_model,
)
from engine.config import EngineConfig
from engine.model.config import ModelConfig, read_model_config
from engine.start.build import load_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def shape(checkpoint: Path) -> ModelConfig:
    return read_model_config(checkpoint)


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> dict[str, Generate]:
    config = EngineConfig(max_running=4, max_step_tokens=64, max_context=128, prefix_cache=False)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = load_engine(checkpoint, config, num_blocks=40).engine
    return {OURS: with_engine(engine), ONE_BY_ONE: one_by_one(model), PADDED: padded(model)}


def asks(*sizes: tuple[int, int]) -> list[Ask]:
    rng = np.random.default_rng(3)
    return [Ask(rng.integers(1, VOCAB, prompt, np.int32), count) for prompt, count in sizes]


def test_all_engines_give_the_same_ids_in_exactly_the_lengths_asked_for(engines: dict[str, Generate]) -> None:
    batch = asks((5, 9), (30, 4), (17, 16))
    outputs = {name: timed(run, batch) for name, run in engines.items()}
    assert all(done.lengths_ok for done in outputs.values())
    assert [len(output) for output in outputs[OURS].outputs] == [9, 4, 16]
    assert outputs[OURS].outputs == outputs[ONE_BY_ONE].outputs == outputs[PADDED].outputs


def test_a_wrong_length_is_noticed() -> None:
    assert not timed(lambda _: [[1, 2], [3]], asks((1, 2), (1, 2))).lengths_ok
    assert not timed(lambda _: [[1, 2]], asks((1, 2), (1, 2))).lengths_ok


def test_the_mixed_workload_is_mixed_and_new_in_each_run() -> None:
    first, second = mixed(0), mixed(1)
    sizes = [(len(ask.prompt), ask.count) for ask in first]
    assert sizes == [(len(ask.prompt), ask.count) for ask in second]
    assert len({prompt for prompt, _ in sizes}) == len({count for _, count in sizes}) == 16
    assert sizes != sorted(sizes)
    assert not any(np.array_equal(a.prompt, b.prompt) for a, b in zip(first, second, strict=True))


class Clock:
    """Time that passes by 1 ms a token, beside 50 ms a call."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def generate(self, batch: Sequence[Ask]) -> list[list[int]]:
        self.now += 0.05 + 0.001 * sum(ask.count for ask in batch)
        return [[0] * ask.count for ask in batch]


def test_figures_become_results_that_the_report_can_read(shape: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("bench.cpu.time", clock)
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    made = results(measure_mixed(dict.fromkeys((OURS, ONE_BY_ONE, PADDED), clock.generate), 2), "cpu-16", shape, 3)
    made += results(measure_one(dict.fromkeys((OURS, ONE_BY_ONE), clock.generate), 3), "cpu-1", shape, 3)
    tokens = sum(ask.count for ask in mixed(0))
    assert [(r["workload"], r["engine"], r["metrics"]["output_tok_s"]["median"]) for r in made] == [
        *(
            ("cpu-16", name, pytest.approx(tokens / (0.05 + 0.001 * tokens), rel=1e-3))
            for name in (OURS, ONE_BY_ONE, PADDED)
        ),
        *(("cpu-1", name, pytest.approx(1000, rel=1e-3)) for name in (OURS, ONE_BY_ONE)),
    ]
    for result in made:
        assert set(FIELDS) <= result.keys()
        assert result["forced_length_ok"]
        assert (result["commit"], result["model"], result["settings"]["threads"]) == ("abc", "qwen3-4x256", 3)
    assert made[0]["outputs_like_ours"] == "32 of 32"
    assert [len(r["metrics"]["output_tok_s"]["runs"]) for r in made] == [2, 2, 2, 3, 3]
    assert len(table(made).splitlines()) == 1 + len(made)


def test_each_missed_target_and_wrong_length_is_told() -> None:
    def result(workload: str, engine: str, rate: float, ok: bool = True) -> dict[str, Any]:
        metrics = {"output_tok_s": {"median": rate, "runs": [rate]}}
        return {"workload": workload, "engine": engine, "forced_length_ok": ok, "metrics": metrics}

    made = [
        result("cpu-1", OURS, 100),
        result("cpu-1", ONE_BY_ONE, 100),
        result("cpu-16", OURS, 399),
        result("cpu-16", ONE_BY_ONE, 100),
        result("cpu-16", PADDED, 300),
    ]
    assert missed(made) == ["cpu-16: 3.99 times transformers-one-by-one, target 4"]
    made[2] = result("cpu-16", OURS, 401, ok=False)
    assert missed(made) == ["cpu-16, rollout-worker: lengths are wrong"]
