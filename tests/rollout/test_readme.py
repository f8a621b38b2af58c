"""What the README says is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rollout.client import Trajectory
from rollout.local import local_worker
from tests.rigs import RandModel, write_rand
from tests.rollout import options_table

ROOT = Path(__file__).parents[2]


def test_the_options_table_is_the_config() -> None:
    assert options_table.parts()[1] == options_table.table()


@pytest.mark.parametrize(
    "document", ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]
)
def test_every_link_leads_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / document).parent / target).exists(), target


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_trainer_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert len(code[1].splitlines()) <= 20
    model = RandModel()
    start = write_rand(tmp_path / "start", model)
    learned: list[tuple[int, float]] = []
    saved: list[Path] = []

    def learn(
        prompt: np.ndarray, response: np.ndarray, mask: np.ndarray, logprobs: np.ndarray, advantage: float
    ) -> None:
        assert len(response) == len(mask) == len(logprobs) > len(prompt)
        assert (logprobs[mask == 1] < 0).all()
        learned.append((int(mask.sum()), advantage))

    def save_weights(step: int) -> Path:
        saved.append(write_rand(tmp_path / str(step), RandModel(seed=step + 1)))
        return saved[-1]

    def score(trajectory: Trajectory) -> float:
        assert trajectory.weight_version_min == trajectory.weight_version_max == len(saved)
        return float(trajectory.response_ids[0] % 2)

    with local_worker(start) as worker:
        names = {
            "STEPS": 2,
            "tasks": lambda step: [([1, 2, 3], [4, 5]), ([6 + step], [7])],
            "score": score,
            "learn": learn,
            "save_weights": save_weights,
        }
        exec(code[1].replace("tcp://127.0.0.1:5555", worker.address), names)
    assert len(saved) == 2
    assert [tokens for tokens, _ in learned] == [128] * 32
