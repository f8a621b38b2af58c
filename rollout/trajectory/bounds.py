"""How long a trajectory may become, and the `End` of one that would be longer."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.fields import Budget, TrajectoryReason, Truncation, Turn
from rollout.environments.answer import End


@dataclass(frozen=True, slots=True)
class Bounds:
    """max_context: tokens that the model takes."""

    budget: Budget
    max_context: int

    @property
    def tokens(self) -> int:
        """Of the segment that grows. An exact fit fits."""
        return min(self.budget.max_total_tokens or self.max_context, self.max_context)

    def overflow(self) -> End:
        """It would need more tokens."""
        if self.tokens < self.max_context:
            return _end("max_total_tokens", "max_total_tokens", self.tokens)
        return self.context_overflow()

    def context_overflow(self) -> End:
        return _end("context_overflow", "max_context", self.max_context)

    def cut(self, turn: Turn) -> End:
        """It ends because its turn was cut."""
        if turn.finish_reason == "turn_deadline":
            return _end("length", "turn_deadline_s", self.budget.turn_deadline_s or 0.0)
        return _end("length", "max_tokens", turn.length)


def _end(reason: TrajectoryReason, limit: str, value: float) -> End:
    return End(reason, Truncation.model_construct(limit=limit, value=float(value)))
