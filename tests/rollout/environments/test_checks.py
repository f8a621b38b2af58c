"""What environment code may return, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.environments.answer import Answer
from rollout.environments.base import Observation, Rewards, Step
from rollout.environments.checks import BadAnswer, check_final, check_observation, check_step
from tests.rollout.build import MODEL

VOCAB = MODEL.vocab_size


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (None, "None, not a Step"),
        ((1, 2), "a tuple, not a Step"),
        (Step, "a ABCMeta|a type, not a Step"),
        (Step(observation="text"), "observation is a str"),
        (Step(observation="hello"), "observation is a str, .*: context.encode makes ids of it"),
        (Step(observation=[1.5]), r"observation\[0\] is a float"),
        (Step(observation=[1, True]), r"observation\[1\] is a bool"),
        (Step(observation=[1, None]), r"observation\[1\] is None"),
        (Step(observation=[-1]), r"observation\[0\] is -1"),
        (Step(observation=[3, VOCAB]), rf"observation\[1\] is {VOCAB}"),
        (Step(observation=[2**70]), r"outside of the vocabulary"),
        (Step(glue=np.array([[1]])), r"glue is int64\[1, 1\]"),
        (Step(glue=np.array([0.0])), r"glue is float64"),
        (Step(glue=np.array([VOCAB])), r"glue\[0\]"),
        (Step(glue=np.array([2**40])), r"glue\[0\]"),
        (Step(observation=b"ab"), "observation is a bytes"),
        (Step(observation={1: 2}), "observation is a dict"),
        (Step(done="yes"), "done is a str"),
        (Step(reward=float("nan")), "reward is nan"),
        (Step(reward=float("inf")), "reward is inf"),
        (Step(reward="1"), "reward is a str"),
        (Step(reward=np.zeros(2)), "reward is float64"),
        (Step(max_tokens=0), "max_tokens is 0"),
        (Step(max_tokens=True), "max_tokens is a bool"),
        (Step(max_tokens=2.0), "max_tokens is a float"),
        (Step(max_tokens=2**31), f"max_tokens is {2**31}, more than"),
        (Step(max_tokens=10**5000), "max_tokens is an int, more than"),
        (Step(reward=10**400), "reward is a int too large"),
    ],
)
def test_a_step_that_means_nothing_is_refused_by_name(returned: Any, complaint: str) -> None:
    with pytest.raises(BadAnswer, match=complaint):
        check_step(returned, VOCAB)


@pytest.mark.parametrize("ids", [np.array([5, -1], np.int8), np.array([5, -1], np.int16), [np.uint64(5), -1]])
def test_a_negative_id_is_refused_however_narrow_its_integers_are(ids: Any) -> None:
    """As an unsigned number of one or two bytes it would lie in the vocabulary; and numpy makes floats of a mixture."""
    with pytest.raises(BadAnswer, match=r"observation\[1\] is -1, outside of the vocabulary"):
        check_step(Step(observation=ids), 2**17)


def test_a_step_is_copied_into_plain_arrays() -> None:
    buffer = np.array([4, 5], np.uint16)
    answer = check_step(
        Step(observation=buffer, glue=[np.int64(6)], done=np.bool_(True), reward=np.float32(0.5)), VOCAB
    )
    buffer[:] = 9
    assert answer.observation is not None
    assert answer.glue is not None
    assert (answer.observation.dtype, answer.observation.tolist(), answer.glue.tolist()) == (np.int32, [4, 5], [6])
    assert (answer.done, answer.reward, answer.max_tokens) == (True, 0.5, None)
    assert check_step(Step(observation=[], max_tokens=np.int64(3)), VOCAB).max_tokens == 3
    assert check_step(Step(max_tokens=2**31 - 1), VOCAB).max_tokens == 2**31 - 1
    without_dimensions: Any = {"done": np.array(True), "max_tokens": torch.tensor(3), "reward": np.array(0.5)}
    answer = check_step(Step(**without_dimensions), VOCAB)
    assert (answer.done, answer.max_tokens, answer.reward) == (True, 3, 0.5)


def test_reset_may_add_to_the_prompt_or_not() -> None:
    assert check_observation(None, VOCAB) == Answer()
    answer = check_observation(Observation(ids=(1, 2), glue=[3], max_tokens=4), VOCAB)
    assert answer.observation is not None
    assert (answer.observation.tolist(), answer.max_tokens, answer.done) == ([1, 2], 4, False)
    with pytest.raises(BadAnswer, match="reset returned a list"):
        check_observation([1, 2], VOCAB)


@pytest.mark.parametrize(
    ("returned", "total", "parts"),
    [
        (None, None, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.25), 0.25, {}),
        (np.array(0.25), 0.25, {}),
        (torch.tensor(0.25), 0.25, {}),
        ({"a": torch.tensor(1)}, 1.0, {"a": 1.0}),
        (np.bool_(True), 1.0, {}),
        ({"a": 1, "b": 0.5}, 1.5, {"a": 1.0, "b": 0.5}),
        ({}, None, {}),
        (Rewards(None, {"a": 1.0}), None, {"a": 1.0}),
        (Rewards(0.5, {"a": 1.0}), 0.5, {"a": 1.0}),
    ],
)
def test_a_final_reward_is_a_number_or_named_numbers(returned: Any, total: Any, parts: dict[str, float]) -> None:
    assert check_final(returned) == Rewards(total, parts)


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"),
        "1",
        [1.0],
        {"a": float("nan")},
        {"a": None},
        {"a": 10**400},
        {1: 1.0},
        {"a": 1e308, "b": 1e308},
        {str(i): 0.0 for i in range(257)},
        {"": 1.0},
        {"a" * 257: 1.0},
        {"\ud800": 1.0},
        Rewards("x"),
        Rewards(1.0, [1.0]),
    ],
)
def test_anything_else_is_no_reward(returned: Any) -> None:
    with pytest.raises(BadAnswer):
        check_final(returned)
