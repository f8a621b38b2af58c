"""The bare driver on the tiny model: every kind of workload to its end, and the file that is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.comparison import FIELDS
from bench.engine import engine_config, kv_bytes, main, run
from bench.feed import Trajectory
from bench.measure import parser
from bench.workloads import Job, Turn, Workload, jobs, workloads
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.config import read_model_config
from engine.request import Completion, FinishReason
from engine.start.build import load_engine

VOCAB = 512


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    config = EngineConfig(max_running=8, max_step_tokens=64, max_context=128)
    return load_engine(tiny, config, kv_bytes=2 * 10**6).engine


def test_files_of_flat_and_of_agentic_workloads(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setenv("BENCH_CLEAN", "1")
    names = ["B", "F_t1", "tail", "grpo", "code_localization", "tool_turns"]
    options = ["--shrink", "512", "--runs", "1", "--max-step-tokens", "256", "--json-dir", str(tmp_path)]
    main(["--weights", str(tiny), "--workload", *names, *options])
    results = {r["workload"]: r for r in (json.loads(f.read_text()) for f in (tmp_path / "rollout-worker").iterdir())}
    assert results.keys() == {f"{name}_div512" for name in names}
    for result in results.values():
        assert set(FIELDS) <= result.keys()
        assert result["forced_length_ok"] is True
        told = ("engine", "driver", "model", "dtype", "commit", "clean", "measured")
        assert [result[name] for name in told] == [
            "rollout-worker",
            "bare",
            "tiny",
            "bfloat16",
            "abc",
            True,
            "here",
        ]
        assert "threads" in result["device"]
        assert "torch" in result["versions"]
        for metric in result["metrics"].values():
            assert metric.keys() == {"median", "runs"}
            assert len(metric["runs"]) == 1
    flat, agents = {"output_tok_s", "tpot_ms", "first_token_ms", "gb_s"}, {"output_tok_s", "trajectories_s"}
    for name, expected in (
        ("B", flat),
        ("F_t1", flat),
        ("tail", flat),
        ("grpo", agents),
        ("code_localization", agents),
        ("tool_turns", agents),
    ):
        assert results[f"{name}_div512"]["metrics"].keys() == expected
    for name, result in results.items():
        sampled = workloads()[name.removesuffix("_div512")].shrunk(512).sampled_tokens
        assert result["counters"][0]["sampled_tokens_total"] == sampled
    assert results["B_div512"]["settings"]["prefix_cache"] is False
    assert results["grpo_div512"]["settings"]["prefix_cache"] is True


def test_what_was_asked_for_beside_the_workload_is_told_apart(tiny: Path, tmp_path: Path) -> None:
    common = [
        "--weights",
        str(tiny),
        "--workload",
        "grpo",
        "--shrink",
        "512",
        "--runs",
        "1",
        "--json-dir",
        str(tmp_path),
    ]
    for asked in ([], ["--shuffled"], ["--kv-tokens", "2048"]):
        main(common + asked)
    files = sorted((tmp_path / "rollout-worker").iterdir(), key=lambda file: len(file.name))
    names = [file.stem.partition("grpo")[2] for file in files]
    assert names == ["_div512", "_div512--shuffled", "_div512--kv-tokens-2048"]
    results = [json.loads(file.read_text()) for file in files]
    assert [result["variant"] for result in results] == ["", "--shuffled", "--kv-tokens 2048"]
    assert [result["settings"]["shuffled"] for result in results] == [False, True, False]
    assert results[2]["settings"]["kv_tokens"] == 2048 != results[0]["settings"]["kv_tokens"]


def test_the_prefix_cache_serves_later_turns_and_siblings_but_not_the_next_run(engine: Engine) -> None:
    workload = Workload("w", ((Turn(48, 16), Turn(16, 16)),), samples=4, temperature=1.0)
    for seed in (1, 2):
        counters = run(engine, VOCAB, False, workload, seed).counters
        # Three siblings find two blocks of the prompt at least; every second turn finds its first four blocks.
        cached = counters["cached_prompt_tokens_total"]
        assert 3 * 32 + 4 * 48 <= cached <= 3 * 48 + 4 * 64
        assert counters["sampled_tokens_total"] == 4 * 32
        assert 2 <= counters["prompt_steps_total"] < counters["steps_total"]
        assert (counters["graph_steps_total"], counters["padding_tokens_total"]) == (0, 0)  # a CPU captures nothing


def test_shuffled_siblings_still_share_their_prompt(engine: Engine) -> None:
    workload = Workload("w", 3 * ((Turn(48, 4), Turn(16, 4)),), samples=4, temperature=1.0)
    result = run(engine, VOCAB, True, workload, 3)
    assert result.lengths_ok
    assert result.counters["cached_prompt_tokens_total"] >= 3 * 3 * 32


def test_a_request_is_the_same_whoever_makes_it() -> None:
    workload = Workload("w", ((Turn(5, 3), Turn(2, 4)),), samples=2, temperature=1.0)
    job = jobs(workload, 9)[1]
    first = Trajectory(workload, job, 0, VOCAB).request()
    again = Trajectory(workload, job, 3, VOCAB).request()
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    assert first.params == again.params
    assert (first.params.temperature, first.params.sample_index) == (1.0, 1)
    assert not first.stop.ids


class Turns:
    """A trajectory of two turns, with completions made here."""

    def __init__(self) -> None:
        self.workload = Workload("w", ((Turn(5, 3), Turn(2, 4)),), samples=2)
        self.trajectory = Trajectory(self.workload, Job(0, 0, self.workload.groups[0], 1), 6, VOCAB)

    @staticmethod
    def completion(count: int, reason: FinishReason = "length", logprob: float = -1.0) -> Completion:
        ids = np.arange(count, dtype=np.int32)
        return Completion("0.0", reason, ids, {"processed": np.full(count, logprob, np.float32)})


def test_the_next_turn_goes_on_where_the_last_one_ended() -> None:
    turns = Turns()
    first = turns.trajectory.request()
    assert (len(first.token_ids), first.max_tokens, first.order, first.group) == (5, 3, 6, "1")
    assert turns.trajectory.end_turn(Turns.completion(3))
    second = turns.trajectory.request()
    assert (len(second.token_ids), second.max_tokens, second.order, second.group) == (10, 4, 6, "")
    np.testing.assert_array_equal(second.token_ids[:8], [*first.token_ids, 0, 1, 2])
    assert not turns.trajectory.end_turn(Turns.completion(4))
    assert turns.trajectory.lengths_ok


@pytest.mark.parametrize(
    "completion",
    [
        Turns.completion(2),
        Turns.completion(3, "stop"),
        Turns.completion(3, logprob=float("nan")),
        Completion("0.0", "length", np.zeros(3, np.int32), {"processed": np.zeros(2, np.float32)}),
    ],
    ids=["short", "stopped", "nan", "logprobs"],
)
def test_a_turn_that_is_not_as_forced_is_noticed(completion: Completion) -> None:
    turns = Turns()
    turns.trajectory.end_turn(completion)
    assert not turns.trajectory.lengths_ok


def options(*more: str) -> Any:
    return parser(None).parse_args(["--weights", "w", "--workload", "grpo", *more])


def test_the_engine_is_made_for_the_largest_of_its_workloads(tiny: Path) -> None:
    works = [workloads()[name] for name in ("A", "E", "F")]
    config = engine_config(works, options())
    assert config.max_running == 64
    assert 8192 + 64 <= config.max_context < 8192 + 64 + 32
    assert engine_config(works, options("--max-running", "512")).max_running == 512
    model = read_model_config(tiny)
    per_token = 2 * 2 * 2 * 16 * 2
    assert kv_bytes(None, works, model, "bfloat16", "cpu") >= per_token * 64 * 1024
    assert kv_bytes(1600, works, model, "bfloat16", "cuda") == per_token * (16 + 1600)
    assert kv_bytes(None, works, model, "bfloat16", "cuda") is None


def test_a_pool_of_that_size_preempts_nobody(tiny: Path) -> None:
    """Prompts and lengths that fill blocks badly, all rows at once."""
    workload = Workload("w", tuple((Turn(17, 16 + i),) for i in range(8)))
    config = engine_config([workload], options("--max-step-tokens", "256"))
    pool = kv_bytes(None, [workload], read_model_config(tiny), "float32", "cpu")
    result = run(load_engine(tiny, config, kv_bytes=pool).engine, VOCAB, False, workload, 0)
    assert result.lengths_ok
    assert result.counters["preemptions_total"] == 0
    assert result.counters["bubbles_total"] == 0
