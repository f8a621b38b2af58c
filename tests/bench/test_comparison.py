from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.comparison import Comparison, comparisons, median, read
from bench.make_model import SHAPES
from bench.measure import COPY_BANDWIDTH, Reads
from bench.report_fields import ROOT
from bench.workloads import workloads
from engine.model.config import parse_model_config
from tests.bench.results import CPU, GPU, result, write_all

VLLM = ROOT / "bench" / "results" / "vllm-0.26.0"


def test_devices_and_models_never_meet() -> None:
    found = comparisons(
        [
            result(engine="vllm"),
            result(device=CPU, tok_s=5.0),
            result(),
            result(model="qwen3-8b"),
            result(engine="transformers", device=CPU),
        ]
    )
    assert [(each.device, each.model) for each in found] == [
        (GPU, "qwen3-4b"),
        (CPU, "qwen3-4b"),
        (GPU, "qwen3-8b"),
    ]
    assert [each.peers for each in found] == [["vllm"], ["transformers"], []]
    assert len({each.slug for each in found}) == 3


def test_what_may_not_be_shown_is_named(tmp_path: Path) -> None:
    write_all(
        tmp_path,
        result("A"),
        result("B", forced_length_ok=False),
        result("C_div16"),
        result("D", forced_length_ok=None),
    )
    (tmp_path / "sweep.json").write_text(json.dumps([{"batch": 1}]))
    shown, left_out = read(tmp_path)
    assert [each["workload"] for each in shown] == ["A", "D"]
    assert len(left_out) == 3
    for line, why in zip(left_out, ("lengths are wrong", "trial", "another kind"), strict=True):
        assert why in line


def test_workloads_come_in_their_order_and_others_after_them() -> None:
    names = ["zebra", "grpo", "F_t1", "A", "code_localization", "G"]
    found = Comparison(GPU, "m", [result(name) for name in names])
    assert found.workloads == ["A", "G", "F_t1", "grpo", "code_localization", "zebra"]


def test_a_variant_is_a_row_of_its_own_beside_its_workload() -> None:
    results = [result("tool_turns"), result("grpo", variant="--shuffled"), result("grpo")]
    assert Comparison(GPU, "m", results).workloads == ["grpo", "grpo --shuffled", "tool_turns"]


def test_of_a_workload_peers_come_first_and_the_worker_last() -> None:
    found = Comparison(GPU, "m", [result(driver="zmq"), result(), result(engine="vllm"), result(engine="sglang")])
    assert [(each["engine"], each["driver"]) for each in found.of("A")] == [
        ("sglang", "bare"),
        ("vllm", "bare"),
        ("rollout-worker", "bare"),
        ("rollout-worker", "zmq"),
    ]


def test_two_results_of_one_thing_are_refused() -> None:
    with pytest.raises(ValueError, match="two results"):
        Comparison(GPU, "m", [result(tok_s=1.0), result(tok_s=2.0)])


def test_what_is_missing_is_none() -> None:
    assert median(None, "output_tok_s") is None
    assert median(result(), "tpot_ms") is None
    assert median(result(tok_s=7.0), "output_tok_s") == 7.0


def test_the_peers_rows_say_where_they_come_from() -> None:
    shown, left_out = read(VLLM)
    assert not left_out
    (comparison,) = comparisons(shown)
    assert (comparison.device, comparison.model, comparison.peers) == (GPU, "qwen3-4b", ["vllm-0.26.0"])
    assert set(comparison.workloads) == workloads().keys() - {"tail", "F_filtered", "tool_turns"}
    reads = Reads.of(parse_model_config(SHAPES["qwen3-4b"]), 2)
    for each in shown:
        assert each["measured"] == "elsewhere"
        assert each["versions"]["vllm"] == "0.26.0"
        workload = workloads()[each["workload"]]
        if workload.short:
            seconds = each["metrics"]["tpot_ms"]["median"] / 1e3
            assert each["metrics"]["gb_s"]["median"] == pytest.approx(reads.step(workload) / 1e9 / seconds, rel=1e-3)
            share = reads.step(workload) / COPY_BANDWIDTH[GPU] / seconds
            assert each["metrics"]["floor_share"]["median"] == pytest.approx(share, rel=1e-3)
        for (wall,), rate in zip(each.get("wall_s", ()), each["metrics"]["output_tok_s"]["runs"], strict=False):
            assert rate == pytest.approx(workload.sampled_tokens / wall, rel=2e-3)
