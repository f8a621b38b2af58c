"""The TRL examples, as one runs them: TRL's own numbers say that rollouts, masks and weights are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def example(name: str, folder: Path, *arguments: str, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """Offline, as on a node without a hub. A thread that is left at the end would abort the process."""
    environment = os.environ | {"TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    command = [sys.executable, "-m", f"examples.{name}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path.name for path in folder.iterdir() if path.name.startswith(("trl-", "rollout-"))]
    assert left == []
    return done


def steps(output: str) -> list[dict[str, float]]:
    """The lines "step 1: reward 0.4, ..." as numbers by the last word before each."""
    lines = re.findall(r"^step \d+: (.*)$", output, re.MULTILINE)
    return [{part.rsplit(" ", 2)[-2]: float(part.rsplit(" ", 1)[-1]) for part in line.split(", ")} for line in lines]


def test_trls_grpo_trainer(tmp_path: Path) -> None:
    """The example fails by itself if TRL finds a logprob more than 1e-4 from its own, or a gradient is 0."""
    done = example("trl_grpo", tmp_path, "--steps", "2")
    found = steps(done.stdout)
    assert len(found) == 2
    assert all(0 < step["by"] <= 1e-4 and step["gradient"] > 0.01 for step in found)
    assert "the worker serves version 2" in done.stdout


def check_async(done: subprocess.CompletedProcess[str], count: int) -> list[dict[str, float]]:
    found = steps(done.stdout)
    assert len(found) == count
    assert found[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert found[0]["staleness"] == 0
    assert all(step["gradient"] > 0.01 for step in found)
    assert "serves the trainer's weights" in done.stdout
    difference = re.search(r"differ from the trainer's by (\S+)$", done.stdout, re.MULTILINE)
    assert difference is not None
    assert float(difference[1]) <= 1e-4
    return found


@pytest.mark.stress
def test_trls_async_grpo_trainer(tmp_path: Path) -> None:
    found = check_async(example("trl_async_grpo", tmp_path, "--steps", "3"), 3)
    assert found[-1]["staleness"] > 0  # it does train on what older weights sampled
    assert any(abs(step["ratio"] - 1) > 1e-5 for step in found[1:])


@pytest.mark.stress
def test_many_steps_in_a_row_stay_exact(tmp_path: Path) -> None:
    """Each step is checked by TRL; the rewards show that it learns."""
    found = steps(example("trl_grpo", tmp_path, "--steps", "50", timeout=1500).stdout)
    assert all(step["by"] <= 1e-4 for step in found)
    rewards = [step["reward"] for step in found]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 3


@pytest.mark.stress
def test_many_weight_updates_under_rollouts(tmp_path: Path) -> None:
    check_async(example("trl_async_grpo", tmp_path, "--steps", "60", timeout=1500), 60)
