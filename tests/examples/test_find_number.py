"""The demo itself, short: a real worker, a few rounds, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.find_number.__main__ import ENVIRONMENT, verdict
from examples.find_number.model import make_model
from examples.find_number.report import Round
from rollout.client import RolloutClient
from rollout.local import local_worker

ROOT = Path(__file__).parent.parent.parent


def demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "examples.find_number", "--out", str(folder / "out"), *arguments]
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert list(temporary.iterdir()) == [], "temporary files are left"
    return done


def test_three_rounds_are_too_few_to_learn_and_it_says_so(tmp_path: Path) -> None:
    done = demo(tmp_path, "--rounds", "3", "--samples", "4", "--seed", "1")
    assert done.returncode == 1, done.stderr
    assert "FAILED: mean reward" in done.stderr
    assert "of the last five rounds is below 0.575" in done.stderr
    curve = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert curve["seed"] == 1
    assert [r["weight_version"] for r in curve["rounds"]] == [1, 2, 3]
    assert all(0 < r["logprob_difference"] < 1e-3 for r in curve["rounds"])
    assert all(r["unscored"] == 0 and 32 <= r["tokens"] <= 96 for r in curve["rounds"])
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "best without listening" in done.stdout


@pytest.mark.stress
def test_a_worker_of_ones_own_is_given_the_demos_weights(tmp_path: Path) -> None:
    """Started with other weights at version 5, it serves the demo's from 6 on; only the newest files are kept."""
    make_model(seed=9).save_pretrained(tmp_path / "other")
    with (
        local_worker(tmp_path / "other", env=[ENVIRONMENT], weight_version=5, log_level="warning") as worker,
        RolloutClient(worker.address) as client,
    ):
        folder = tmp_path / "weights"
        done = demo(
            tmp_path, "--rounds", "2", "--samples", "2", "--address", worker.address, "--weights-dir", str(folder)
        )
        served = client.status().weight_version
    assert "FAILED: mean reward" in done.stderr
    curve = json.loads((tmp_path / "out" / "curve.json").read_text())
    assert [r["weight_version"] for r in curve["rounds"]] == [7, 8]
    assert served == 8
    assert all(r["logprob_difference"] < 1e-3 for r in curve["rounds"])
    assert sorted(path.name for path in folder.iterdir()) == ["version-0007", "version-0008"]


@pytest.mark.parametrize(
    ("reward", "difference", "said"),
    [
        (0.58, 1e-6, []),
        (0.57, 1e-6, ["mean reward 0.570 of the last five rounds is below 0.575"]),
        (0.58, 2e-3, ["differ by 2.0e-03, not below 1e-03"]),
        (0.1, float("nan"), ["mean reward 0.100", "differ by nan"]),
    ],
)
def test_the_verdict(capsys: pytest.CaptureFixture[str], reward: float, difference: float, said: list[str]) -> None:
    def a_round(reward: float, difference: float) -> Round:
        return Round(0, reward, 0, 2.5, 10, difference, 1, 0.1, 0.1, 0.1)

    rounds = [a_round(1.0, difference), *[a_round(reward, 1e-6)] * 5]
    assert verdict(rounds) == (1 if said else 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line
