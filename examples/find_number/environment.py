"""The game: find a hidden number of 8 in three guesses, told higher or lower after each wrong one.

The worker loads this file (`--env find_number=examples.find_number.environment:FindNumber`) and makes one
`FindNumber` for every trajectory. A trajectory of tokens looks like this, the hidden number being 6:

    START  4  HIGHER  5  HIGHER  6
    prompt    observation         reward 1
           sampled    sampled     sampled
"""

from __future__ import annotations

from protocols.fields import Record
from rollout.environments.base import Context, Environment, Step, TurnResult

NUMBERS = 8
"""Ids 0 to 7 are the numbers themselves."""
START, HIGHER, LOWER, NO_NUMBER = range(NUMBERS, NUMBERS + 4)
VOCABULARY = NO_NUMBER + 1
GUESSES = 3

BLIND = GUESSES / NUMBERS
"""What the best player reaches who does not listen to the answers: three different numbers."""
PERFECT = (2**GUESSES - 1) / NUMBERS
"""What bisection reaches: one number with the first guess, two with the second, four with the third."""


class FindNumber(Environment):
    """config: {"hidden": number}, so all samples of a group look for the same one. Reward 1 if found, else 0."""

    # A guess is one token, so every turn is cut by max_tokens; the game goes on nevertheless.
    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self._hidden = int(context.config["hidden"])
        self._found = False

    async def step(self, turn: TurnResult) -> Step:
        guess = int(turn.token_ids[0])
        self._found = guess == self._hidden
        if self._found or turn.index + 1 == GUESSES:
            return Step(done=True)
        if guess >= NUMBERS:  # nothing stops a model from sampling one of the words: that guess is lost
            return Step(observation=[NO_NUMBER])
        return Step(observation=[HIGHER if self._hidden > guess else LOWER])

    async def finish(self, record: Record) -> float:  # noqa: ARG002
        return float(self._found)
