"""reasoning-gym behind a trajectory: the same question for the same config, the task's own score."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rollout.environments.adapters.play import play, text

pytest.importorskip("reasoning_gym")

from rollout.environments.adapters.reasoning_gym import ReasoningGym, load, messages

LEGS = {"task": "leg_counting", "index": 3, "seed": 42}


def answered(config: dict[str, Any], reply: str, **changes: Any) -> Any:
    return play(ReasoningGym, config, messages(config), [reply], **changes)


@pytest.mark.parametrize(
    ("reply", "score", "tagged"),
    [
        ("So it is <answer>187</answer>", 1.0, 1.0),
        ("<answer>1</answer> no, <answer> 187 </answer>.", 1.0, 1.0),
        ("187", 1.0, 0.0),
        ("<answer>186</answer>", 0.0, 1.0),
        ("<think><answer>187</answer></think>I do not know", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_an_answer_is_scored(reply: str, score: float, tagged: float) -> None:
    assert load(LEGS)[1]["answer"] == "187"
    record = answered(LEGS, reply)
    assert (record.status, record.finish_reason, record.error) == ("completed", "env_done", None)
    assert (record.reward, record.rewards) == (score, {"accuracy": score, "format": tagged})
    assert len(record.segments[0].turns) == 1


def test_it_runs_in_a_process() -> None:
    record = answered(LEGS, "<answer>187</answer>", isolated=True)
    assert (record.reward, record.error) == (1.0, None)
    assert "how many legs" in text(record)


def test_a_turn_that_was_cut_gave_no_answer() -> None:
    record = answered(LEGS, "<answer>187</answer>", reason="length")
    assert (record.status, record.reward) == ("truncated", 0.0)


@pytest.mark.parametrize("task", ["leg_counting", "countdown", "gsm_symbolic", "graph_color", "spell_backward"])
def test_a_config_is_one_question_and_its_answer_is_right(task: str) -> None:
    config = {"task": task, "index": 2, "seed": 5}
    dataset, entry = load(config)
    assert messages(config) == messages(config)
    assert dataset.score_answer(entry["answer"], entry) == 1.0 or entry["answer"] is None
    others = [{"index": 3}, {"seed": 7}, {"split": "test"}]
    questions = {messages({**config, **other})[-1]["content"] for other in ({}, *others)}
    assert len(questions) == 4


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"task": "no_such"}, "no_such"),
        ({}, "config.task ''"),
        ({**LEGS, "index": -1}, "config.index"),
        ({**LEGS, "index": "1"}, "config.index must be a int"),
        ({**LEGS, "split": "dev"}, "config.split"),
        ({**LEGS, "levels": 3}, "config.levels is unknown; known: task"),
        ({**LEGS, "params": {"no_such": 1}}, "no_such"),
    ],
)
def test_a_config_that_means_nothing_is_refused_by_name(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        messages(config)
    record = play(ReasoningGym, config, [{"role": "user", "content": "?"}], ["1"])
    assert record.error is not None
    assert (record.finish_reason, record.error.stage) == ("env_error", "reset")
