"""The demo's environment: every answer it gives, and what it is worth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from examples.find_number.environment import (
    BLIND,
    GUESSES,
    HIGHER,
    LOWER,
    NO_NUMBER,
    NUMBERS,
    PERFECT,
    START,
    FindNumber,
)
from protocols.fields import Turn
from rollout.environments.base import Context, TurnResult
from tests.protocols.samples import record
from tests.rollout.build import run


def guess(index: int, number: int) -> TurnResult:
    turn = Turn(index=index, start=1 + 2 * index, length=1, finish_reason="length")
    return TurnResult(turn, np.array([number], np.int32), np.zeros(1, np.float32), total_len=2 + 2 * index)


async def play(hidden: int, guesses: list[int]) -> tuple[list[int], float]:
    """The answers until the game is over, and the reward."""
    game, answers = FindNumber(), []
    await game.reset(context(hidden))
    for index, number in enumerate(guesses):
        step = await game.step(guess(index, number))
        if step.done:
            return answers, await game.finish(record())
        assert step.observation is not None
        answers += list(step.observation)
    raise AssertionError("the game did not end")


def context(hidden: int) -> Context:
    async def ask(_: TurnResult) -> None:
        raise AssertionError("the game asks nobody")

    return Context(
        trajectory_id="t",
        group_id="g",
        sample_index=0,
        seed=0,
        prompt=np.array([START], np.int32),
        vocab_size=NO_NUMBER + 1,
        max_context=64,
        ask=ask,
        config={"hidden": hidden},
    )


@pytest.mark.parametrize(
    ("hidden", "guesses", "answers", "reward"),
    [
        (6, [6], [], 1.0),
        (6, [3, 6], [HIGHER], 1.0),
        (0, [7, 1, 0], [LOWER, LOWER], 1.0),
        (6, [3, 7, 5], [HIGHER, LOWER], 0.0),
        (6, [START, NO_NUMBER, 6], [NO_NUMBER, NO_NUMBER], 1.0),
        (6, [6, 0, 0], [], 1.0),
    ],
)
def test_a_game(hidden: int, guesses: list[int], answers: list[int], reward: float) -> None:
    assert run(play(hidden, guesses)) == (answers, reward)


def test_bisection_is_perfect_and_no_fixed_guesses_are_better_than_blind() -> None:
    def bisect(hidden: int) -> list[int]:
        low, high, guesses = 0, NUMBERS - 1, []
        while len(guesses) < GUESSES:
            guesses.append((low + high) // 2)
            low, high = (guesses[-1] + 1, high) if hidden > guesses[-1] else (low, guesses[-1] - 1)
        return guesses

    async def rewards(choose: object) -> float:
        return float(np.mean([(await play(hidden, list(choose(hidden))))[1] for hidden in range(NUMBERS)]))  # type: ignore[operator]

    assert run(rewards(bisect)) == PERFECT == 7 / 8
    fixed = itertools.product(range(NUMBERS), repeat=GUESSES)
    assert max(run(rewards(lambda _, g=g: g)) for g in itertools.islice(fixed, 0, None, 7)) == BLIND == 3 / 8
