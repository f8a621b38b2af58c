"""The figures, from runs whose walls are chosen here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.make_model import SHAPES
from bench.measure import (
    COPY_BANDWIDTH,
    Reads,
    Run,
    by_prefix_cache,
    grown,
    measure,
    model_name,
    parse,
    parser,
    save,
    steps,
    table,
)
from bench.workloads import Turn, Workload, workloads
from engine.model.config import parse_model_config
from tests.bench.results import result

FLAT = Workload("flat", 4 * ((Turn(100, 20),),), short=4)
READS = Reads(weights=1000, kv_per_token=2)


class Scripted:
    """A driver whose walls are a second for the prompts and `step` for each token; it notes what it was asked."""

    def __init__(self, step: float = 0.5, lengths_ok: bool = True) -> None:
        self.asked: list[tuple[Workload, int]] = []
        self._step = step
        self._lengths_ok = lengths_ok

    def __call__(self, workload: Workload, seed: int) -> Run:
        self.asked.append((workload, seed))
        tokens = sum(turn.sampled for turn in workload.groups[0])
        return Run(1.0 + self._step * (tokens - 1), self._lengths_ok, {"steps_total": tokens})


def test_time_per_token_is_the_difference_of_two_lengths() -> None:
    found = measure(FLAT, Scripted(step=0.5), 3, READS, bandwidth=4000.0)
    metrics = found["metrics"]
    assert metrics["tpot_ms"] == {"median": 500.0, "runs": [500.0] * 3}
    assert metrics["first_token_ms"]["median"] == 1000.0
    assert metrics["output_tok_s"]["median"] == pytest.approx(4 * 20 / (1 + 0.5 * 19), rel=1e-3)
    # Four rows at 100 + 12 tokens of context: 1000 + 2 * 448 bytes a step of half a second.
    assert metrics["gb_s"]["median"] == pytest.approx(1896 / 0.5e9, rel=1e-3)
    assert metrics["floor_share"]["median"] == pytest.approx(1896 / 4000 / 0.5, rel=1e-3)
    assert "trajectories_s" not in metrics
    assert found["forced_length_ok"]
    assert found["counters"] == [{"steps_total": 20}] * 3


def test_no_floor_is_claimed_for_a_device_whose_bandwidth_is_not_known() -> None:
    metrics = measure(FLAT, Scripted(), 1, READS, bandwidth=None)["metrics"]
    assert "floor_share" not in metrics
    assert "gb_s" in metrics


def test_decode_only_takes_the_prompts_out() -> None:
    metrics = measure(replace(FLAT, decode_only=True), Scripted(step=0.5), 1, READS, None)["metrics"]
    assert metrics["output_tok_s"]["median"] == 4 / 0.5


def test_turns_are_counted_in_trajectories_and_warmed_up_by_their_first() -> None:
    workload = Workload("agents", ((Turn(8, 3), Turn(2, 2)),), samples=6)
    drive = Scripted(step=1.0)
    metrics = measure(workload, drive, 2, READS, 1.0)["metrics"]
    assert metrics.keys() == {"output_tok_s", "trajectories_s"}
    assert metrics["trajectories_s"]["median"] == pytest.approx(6 / 5, rel=1e-3)
    assert metrics["output_tok_s"]["median"] == pytest.approx(30 / 5, rel=1e-3)
    assert [asked.groups for asked, _ in drive.asked] == [((Turn(8, 3),),), workload.groups, workload.groups]


def test_a_flat_one_is_run_at_three_lengths_each_with_its_own_seed() -> None:
    drive = Scripted()
    measure(FLAT, drive, 2, READS, None, seed=7)
    assert [asked.groups[0][0].sampled for asked, _ in drive.asked] == [20, 20, 4, 1, 20, 4, 1]
    seeds = [seed for _, seed in drive.asked]
    assert len(set(seeds)) == len(seeds)
    other = Scripted()
    measure(FLAT, other, 2, READS, None, seed=8)
    assert not set(seeds) & {seed for _, seed in other.asked}


def test_one_wrong_length_spoils_a_result() -> None:
    found = measure(FLAT, Scripted(lengths_ok=False), 1, READS, None)
    assert not found["forced_length_ok"]
    assert "WRONG" in table([{"workload": "flat", **found}])


@pytest.mark.parametrize(
    ("name", "floor_ms"),
    [("A", 1.91), ("B", 1.98), ("C", 2.07), ("D", 1.96), ("E", 2.18), ("F", 3.67), ("G", 8.99)],
)
def test_floors_are_those_of_the_measured_baselines(name: str, floor_ms: float) -> None:
    reads = Reads.of(parse_model_config(SHAPES["qwen3-4b"]), 2)
    step = reads.step(workloads()[name]) / COPY_BANDWIDTH["NVIDIA H200"]
    assert step * 1e3 == pytest.approx(floor_ms, abs=0.005)


def test_a_step_reads_a_tied_head_once_and_no_untied_embedding() -> None:
    four, eight = (Reads.of(parse_model_config(SHAPES[name]), 2) for name in ("qwen3-4b", "qwen3-8b"))
    assert four.weights == pytest.approx(8.045e9, rel=1e-4)
    assert eight.weights == pytest.approx(15.136e9, rel=1e-4)
    assert four.kv_per_token == eight.kv_per_token == 147_456


def test_models_are_named_by_their_shape() -> None:
    for name, shape in SHAPES.items():
        assert model_name(parse_model_config(shape | {"eos_token_id": 3})) == name
    assert model_name(parse_model_config(SHAPES["tiny"] | {"num_hidden_layers": 3})) == "qwen3-3x64"


def test_engines_are_one_for_each_setting_of_the_prefix_cache() -> None:
    halves = by_prefix_cache([workloads()[name] for name in ("grpo", "A", "code_localization")])
    assert [[work.name for work in half] for half in halves] == [["A"], ["grpo", "code_localization"]]
    assert len(by_prefix_cache([workloads()["A"]])) == 1


def test_counters_are_told_by_how_far_they_went() -> None:
    before = {"steps_total": 3.0, "running": 1.0, "blocks_total": 9.0}
    assert grown(before, {"steps_total": 8.0, "running": 0.0, "blocks_total": 9.0}) == {"steps_total": 5}


def test_steps_are_told_by_kind() -> None:
    counters = {"steps_total": 9, "prompt_steps_total": 4, "graph_steps_total": 6, "padding_tokens_total": 12}
    assert steps(counters) == "9 steps, 4 with prompt tokens, 3 eager; 12 tokens of padding"


def test_options_that_change_a_figure_make_a_variant() -> None:
    options = parser(None)
    options.add_argument("--shuffled", action="store_true")
    needed = ["--weights", "w", "--workload", "grpo"]
    assert parse(options, [*needed, "--runs", "9", "--dtype", "bfloat16", "--device", "cuda"]).variant == ""
    asked = ["--shuffled", "--kv-tokens", "870704", "--admission", "open"]
    assert parse(options, [*needed, *asked]).variant == "--kv-tokens 870704 --admission open --shuffled"


def test_a_variant_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [save(result("grpo", variant=name), tmp_path) for name in ("", "--shuffled", "--kv-tokens 870704")]
    assert [path.name for path in paths] == [
        "nvidia-h200-qwen3-4b-grpo.json",
        "nvidia-h200-qwen3-4b-grpo--shuffled.json",
        "nvidia-h200-qwen3-4b-grpo--kv-tokens-870704.json",
    ]
