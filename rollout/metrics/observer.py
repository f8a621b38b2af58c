"""What a worker tells of its work, as it happens, to whoever counts and draws it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocols.fields import Record


@dataclass(frozen=True, slots=True)
class Round:
    """One accepted batch. step: the trainer's own, or the weight version that served at accept.

    accepted: `time.monotonic()` of its first submit, in seconds.
    """

    session: str
    batch_id: str
    step: int
    accepted: float


class Observer:
    """Called on the worker's event loop, between two results: each method returns soon and raises nothing.

    This one does nothing: it is that of a worker which nobody watches.
    """

    def batch_accepted(self, batch: Round, trajectories: int) -> None:
        """Once for every submit that brings `trajectories` new ones."""

    def trajectory_ended(self, batch: Round, record: Record, version: int) -> None:
        """version: of the weights that serve now. Every accepted trajectory ends once, wanted or not."""

    def group_done(self, batch: Round, group_id: str, seconds: float) -> None:
        """All its trajectories have ended, `seconds` after the first of them was accepted."""

    def batch_done(self, batch: Round) -> None:
        """All its trajectories have ended. Comes again if more of them are submitted afterwards."""

    def weights_prepared(self, version: int, seconds: float, nbytes: int) -> None:
        """Read and checked in `seconds`, beside generation."""

    def weights_committed(self, version: int, paused_s: float) -> None:
        """`version` serves; no step ran for `paused_s` seconds."""

    def weights_failed(self, stage: Literal["prepare", "commit"]) -> None:
        """The old version serves on."""
