"""`remote`: the trainer answers each turn."""

from __future__ import annotations

from protocols.fields import Record
from rollout.environments.base import Context, Environment, FinalReward, Rewards, Step, TurnResult


class Remote(Environment):
    """Asks the trainer (`turn_done`) and takes its `continue` for the answer."""

    patient = True
    stateless = True

    async def reset(self, context: Context) -> None:
        self._ask = context.ask
        self._rewards = Rewards()

    async def step(self, turn: TurnResult) -> Step:
        answer = await self._ask(turn)
        self._rewards = Rewards(answer.reward, answer.rewards)
        return Step(
            observation=answer.observation,
            glue=answer.glue,
            done=answer.done,
            reward=answer.turn_reward,
            max_tokens=answer.max_tokens,
        )

    async def finish(self, record: Record) -> FinalReward:  # noqa: ARG002
        return self._rewards
