"""One trajectory, run: prompt, turns, environment, record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocols.fields import ModelInfo, Record, TrajectoryReason
from protocols.replies import TurnDone
from protocols.requests import Continue
from rollout.async_engine import AsyncEngine
from rollout.environments.base import Environment, TextCodec
from rollout.trajectory import TrajectorySpec


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds the worker waits for environment code when the trainer set no deadline of its own."""

    step_s: float = 600.0
    finish_s: float = 600.0
    close_s: float = 5.0


class Rollout:
    """Runs one trajectory. `environment` makes its environment (Registry.resolve), inside `run`.

    on_turn gets each `TurnDone` of a `remote` trajectory; its `id` is empty, for the service to fill in.
    """

    def __init__(
        self,
        spec: TrajectorySpec,
        *,
        engine: AsyncEngine,
        environment: Callable[[], Environment],
        model: ModelInfo,
        on_turn: Callable[[TurnDone], None],
        tokenizer: TextCodec | None = None,
        patience: Patience = Patience(),
    ) -> None:
        raise NotImplementedError

    async def run(self) -> Record:
        """Called once. Never raises (cancellation of the task aside): whatever happens becomes the record."""
        raise NotImplementedError

    def cancel(self, reason: TrajectoryReason) -> None:
        """End with what there is; `run` returns soon. Idempotent, the first reason stays; allowed before `run`."""
        raise NotImplementedError

    def answer(self, message: Continue) -> None:
        """The trainer's answer to `turn_done`. Raises PrefixMismatch, UnknownTrajectory, BadRequest."""
        raise NotImplementedError

    @property
    def pending_turn(self) -> TurnDone | None:
        """The `TurnDone` that waits for an answer, to be sent again after a reconnect."""
        raise NotImplementedError
