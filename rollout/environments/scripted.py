"""`scripted`: what follows each turn was in the submit."""

from __future__ import annotations

from collections.abc import Sequence

from protocols.fields import ScriptedTurn
from rollout.environments.base import Environment, Step, TurnResult


class Scripted(Environment):
    """`script[k]` follows turn k; the turn after the last entry is the last one."""

    on_length = "continue"
    fixed_turns = True
    stateless = True
    immediate = True

    def __init__(self, script: Sequence[ScriptedTurn]) -> None:
        self._script = script

    def step(self, turn: TurnResult) -> Step:
        if turn.index >= len(self._script):
            return Step(done=True)
        entry = self._script[turn.index]
        return Step(observation=entry.observation, glue=entry.glue, max_tokens=entry.max_tokens)
