"""How long a trajectory may become, and the `End` of one that would be longer."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.fields import Budget, Truncation, Turn
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
            return End("max_total_tokens", Truncation(limit="max_total_tokens", value=self.tokens))
        return self.context_overflow()

    def context_overflow(self) -> End:
        return End("context_overflow", Truncation(limit="max_context", value=self.max_context))

    def cut(self, turn: Turn) -> End:
        """It ends because its turn was cut."""
        if turn.finish_reason == "turn_deadline":
            return End("length", Truncation(limit="turn_deadline_s", value=self.budget.turn_deadline_s or 0.0))
        return End("length", Truncation(limit="max_tokens", value=turn.length))
