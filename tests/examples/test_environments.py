"""The examples of ready-made environments: a real worker, a model of random weights, a table."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests import rigs
from tests.rollout.chat import tiny

PACKAGES = {"reasoning": "reasoning_gym", "games": "textarena", "functions": "bfcl_eval"}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers and the worker can both load."""
    model = rigs.RandModel(seed=4, max_context=16384)
    checkpoint = rigs.write_rand(tmp_path_factory.mktemp("talking") / "weights", model)
    (checkpoint / "tokenizer.json").write_text(tiny.ordinary().to_str())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (checkpoint / "chat_template.jinja").write_text(tiny.PLAIN)
    return checkpoint


@pytest.mark.stress
@pytest.mark.parametrize("name", ["reasoning", "games"])
def test_it_prints_a_table(
    name: str, talking: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(PACKAGES[name])
    monkeypatch.setattr(sys, "argv", [name, "--samples", "1", "--checkpoint", str(talking)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"examples.environments.{name}", run_name="__main__")
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert "first words" in printed
    assert f"{ {'reasoning': 4, 'games': 3}[name] } trajectories, mean reward" in printed


def test_functions_are_told_in_the_prompt_where_a_template_does_not() -> None:
    pytest.importorskip(PACKAGES["functions"])
    from examples.environments.functions import messages

    system, user = messages({"category": "multi_turn_base", "index": 1})
    assert (system["role"], user["role"]) == ("system", "user")
    assert '"name": "grep"' in system["content"]
