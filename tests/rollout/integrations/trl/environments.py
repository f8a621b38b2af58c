"""An environment for these tests."""

from __future__ import annotations

from protocols.fields import Record
from rollout.environments.base import Context, Environment, Step, TurnResult


class Sometimes(Environment):
    """Fails for odd samples, or always (`always`), in step or already in reset (`reset`); else rewards 0.5."""

    on_length = "continue"

    async def reset(self, context: Context) -> None:
        self._fails = bool(context.sample_index % 2 or context.config.get("always"))
        if self._fails and context.config.get("reset"):
            raise RuntimeError("odd")

    async def step(self, turn: TurnResult) -> Step:  # noqa: ARG002
        if self._fails:
            raise RuntimeError("odd")
        return Step(done=True)

    async def finish(self, record: Record) -> float:  # noqa: ARG002
        return 0.5
