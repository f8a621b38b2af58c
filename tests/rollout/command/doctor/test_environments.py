"""Each --env and each --tools that is wrong is said, beside those that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.command.config import WorkerConfig
from rollout.command.doctor.environments import check

SOUND = """
from rollout.environments.base import Environment, Observation

class Sound(Environment):
    async def reset(self, task):
        return Observation()
    async def step(self, turn):
        return Observation(done=True)

class Lacking(Environment):
    pass
"""


def findings(**options: Any) -> list[tuple[str, str]]:
    config = WorkerConfig(weights=Path("nowhere"), **options)
    return [(finding.level, finding.found) for finding in check(config)]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doctored_envs.py").write_text(SOUND)
    (tmp_path / "doctored_exit.py").write_text("raise SystemExit(3)")
    (tmp_path / "doctored_tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Add two."""\n    return a + b\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_all_that_are_wrong_are_said() -> None:
    specs = ("a=no.such:Module", "b=doctored_envs:Sound", "c=doctored_envs:Lacking", "d=doctored_exit:E")
    wrong = findings(env=specs, tools=("doctored_tools", "no_such_tools"))
    assert [level for level, _ in wrong] == ["fail"] * 4
    for (_, text), part in zip(
        wrong, ("no.such", "c=doctored_envs:Lacking", "d=doctored_exit:E", "no_such_tools"), strict=True
    ):
        assert part in text


def test_those_that_are_right_and_those_that_do_not_go_together() -> None:
    ((level, text),) = findings(env=("b=doctored_envs:Sound", "b=doctored_envs:Sound"))
    assert level == "fail"
    assert "given twice" in text
    sound = findings(env=("b=doctored_envs:Sound",), tools=("doctored_tools",))
    assert sound == [("ok", "b, remote, scripted, tools")]
    assert findings() == [("ok", "remote, scripted")]
