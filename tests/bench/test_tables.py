from __future__ import annotations

import pytest

from bench.comparison import Comparison
from bench.tables import describe, details, number, provenance, summary
from bench.workloads import workloads
from tests.bench.results import GPU, result


def rows(table: str) -> list[dict[str, str]]:
    """The rows of the first Markdown table of a text, by column."""
    lines = [line[2:-2].split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:] if line[0] != "---"]


PEER = result("A", "vllm", 270.7, measured="elsewhere", tpot_ms=3.635)
OURS = result("A", tok_s=300.0, tpot_ms=3.3, gb_s=2464.2, floor_share=0.579)


def test_a_summary_compares() -> None:
    (row,) = rows(summary(Comparison(GPU, "m", [PEER, OURS, result("A", driver="zmq", tok_s=297.0)])))
    assert row["prompt / output / rows"] == "512 / 128 / 1"
    assert (row["vllm"], row["rollout-worker"], row["/ vllm"]) == ("270.7", "**300**", "1.11")
    assert row["over ZeroMQ"] == "297 (-1.0 %)"
    assert (row["GB/s"], row["share of the floor"]) == ("2,464", "58 %")


def test_one_run_alone_is_named() -> None:
    metrics = {"output_tok_s": {"median": 5.0, "runs": [5.0]}}
    ours, peer = result("B", metrics=metrics), result("B", "vllm", metrics=metrics, measured="elsewhere")
    first, second = rows(details(Comparison(GPU, "m", [ours, peer])))
    assert (first["commit"], second["commit"]) == ("measured elsewhere", "0123456789, one run")


def test_results_of_two_commits_are_not_set_against_each_other() -> None:
    worker = result("A", driver="zmq", tok_s=297.0, commit="fedcba9876543210")
    (row,) = rows(summary(Comparison(GPU, "m", [OURS, worker])))
    assert row["over ZeroMQ"] == "297"


def test_a_summary_leaves_empty_what_was_not_measured() -> None:
    found = rows(summary(Comparison(GPU, "m", [PEER, result("tail", tok_s=8000.0), result("G", driver="zmq")])))
    assert [row["workload"] for row in found] == ["A", "G", "tail"]
    assert (found[0]["rollout-worker"], found[0]["/ vllm"]) == ("", "")
    assert found[1]["over ZeroMQ"] == "300"
    assert (found[2]["vllm"], found[2]["rollout-worker"], found[2]["/ vllm"]) == ("", "**8,000**", "")


def test_a_variant_is_named_and_described_as_its_workload() -> None:
    found = rows(summary(Comparison(GPU, "m", [result("grpo"), result("grpo", variant="--kv-tokens 870704")])))
    assert [row["workload"] for row in found] == ["grpo", "grpo --kv-tokens 870704"]
    assert found[1]["prompt / output / rows"] == "64 groups x 8, 3 turns, T=1"


def test_details_tell_the_spread_and_the_sources() -> None:
    dirty = result("grpo", trajectories_s=21.5, clean=False, driver="zmq", tok_s=16500.0)
    first, second, third = rows(details(Comparison(GPU, "m", [PEER, OURS, dirty])))
    assert (first["engine"], first["commit"], first["ms a token"]) == ("vllm", "measured elsewhere", "3.635")
    assert (second["tokens/s"], second["commit"]) == ("300 (297 to 303)", "0123456789")
    assert (third["engine"], third["commit"]) == ("rollout-worker over ZeroMQ", "0123456789, not clean")
    assert (third["trajectories/s"], third["tokens/s"]) == ("21.5", "16,500 (16,335 to 16,665)")


def test_provenance_names_commits_and_versions_once() -> None:
    text = provenance(Comparison(GPU, "m", [PEER, OURS, result("B"), result("C", commit="fedcba9876543210")]))
    assert text.splitlines() == [
        "rollout-worker: 0123456789, fedcba9876 (torch 2.11.0).",
        "vllm: measured elsewhere (torch 2.11.0).",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("F_t1", "512 / 512 / 64, T=1"),
        ("F_filtered", "512 / 512 / 64, T=0.6, top-k 20, top-p 0.95"),
        ("tail", "944 and 16304 / 128 / 64"),
        ("grpo", "64 groups x 8, 3 turns, T=1"),
        ("code_localization", "16 groups x 8, 4-8 turns, T=1"),
        ("tool_turns", "16 groups x 8, 2-10 turns, T=1"),
    ],
)
def test_workloads_are_described(name: str, expected: str) -> None:
    assert describe(workloads()[name]) == expected


def test_numbers() -> None:
    assert [number(value) for value in (None, 1.64, 0.57912, 270.66, 1995.4, 15760.0)] == [
        "",
        "1.64",
        "0.5791",
        "270.7",
        "1,995",
        "15,760",
    ]
