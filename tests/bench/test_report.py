from __future__ import annotations

from pathlib import Path

import pytest

from bench.comparison import Comparison
from bench.plot import plot
from bench.report import between_markers, main, report
from tests.bench.results import CPU, GPU, result, write_all

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        (tmp_path / name).write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_documents_and_plots(root: Path, tmp_path: Path) -> None:
    gpu = [
        result(name, engine, driver=driver)
        for name in ("A", "grpo")
        for engine, driver in (("vllm-0.26.0", "bare"), ("rollout-worker", "bare"), ("rollout-worker", "zmq"))
    ]
    cpu = [result("A", device=CPU, tok_s=4.0), result("A", "transformers", device=CPU, tok_s=2.0)]
    alone = [result("A", model="qwen3-8b")]
    assert report(write_all(tmp_path / "results", *gpu, *cpu, *alone), root) == []
    plots = {path.name: path.read_bytes() for path in (root / "docs" / "figures").iterdir()}
    assert plots.keys() == {"nvidia-h200-qwen3-4b.png", "some-cpu-2-threads-qwen3-4b.png"}
    assert all(content.startswith(PNG) for content in plots.values())
    for name, folder in (("README.md", "docs/figures"), ("docs/performance.md", "figures")):
        text = (root / name).read_text()
        assert text.startswith(f"before\n{BEGIN}\n**")
        assert text.endswith(f"\n{END}\nafter\n")
        assert "old" not in text
        assert text.count("| workload |") == 3
        for plotted in plots:
            assert f"({folder}/{plotted})" in text
        for table in text.split("**qwen3")[1:]:
            assert not ("vllm" in table and "transformers" in table)


def test_the_report_is_stable(root: Path, tmp_path: Path) -> None:
    folder = write_all(tmp_path / "results", result(), result(engine="vllm"))
    report(folder, root)
    texts = [(root / name).read_text() for name in ("README.md", "docs/performance.md")]
    report(folder, root)
    assert [(root / name).read_text() for name in ("README.md", "docs/performance.md")] == texts


def test_documents_without_markers_and_missing_ones_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here\n")
    report(write_all(tmp_path / "results", result(), result(engine="vllm")), tmp_path)
    assert (tmp_path / "README.md").read_text() == "nothing here\n"
    assert not (tmp_path / "docs" / "performance.md").exists()
    assert (tmp_path / "docs" / "figures" / "nvidia-h200-qwen3-4b.png").exists()


def test_a_marker_without_its_end_is_refused() -> None:
    with pytest.raises(ValueError, match="bench:end"):
        between_markers(f"text {BEGIN} text", "bench", "block")


def test_what_is_left_out_is_printed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_all(tmp_path / "results", result(forced_length_ok=False))
    main(["--results", str(folder), "--root", str(root)])
    assert "lengths are wrong" in capsys.readouterr().out


def test_no_plot_without_a_peer_of_the_same_workload(tmp_path: Path) -> None:
    assert plot(Comparison(GPU, "m", [result("A")]), tmp_path) is None
    assert plot(Comparison(GPU, "m", [result("A"), result("B", "vllm")]), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
