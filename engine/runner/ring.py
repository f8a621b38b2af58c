"""Steps between launch and wait: a few are on their way at once, each is waited for once, in launch order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.step import StepOutput

RING = 3
"""Steps that may be launched and not yet waited for, and so the number of input and result buffers."""


class Ring:
    """launched, waited: steps so far. Step n, counted from 0, uses buffer n % RING."""

    def __init__(self) -> None:
        self.launched = 0
        self.waited = 0

    def claim(self) -> int:
        """The buffer of the next step. Raises `RuntimeError` with `RING` steps launched and none of them waited for."""
        if self.launched - self.waited == RING:
            raise RuntimeError(f"{RING} steps are launched and not waited for; their buffers are in use")
        return self.launched % RING

    def launch(self, finish: Callable[[], StepOutput]) -> RingTicket:
        """The step whose buffer was claimed is on its way. finish: waits for the oldest step; see `RingTicket`."""
        self.launched += 1
        return RingTicket(self, self.launched - 1, finish)


@dataclass(frozen=True, slots=True)
class RingTicket:
    """finish: gives the results of the oldest step that was not waited for, in arrays of their own."""

    ring: Ring
    number: int
    finish: Callable[[], StepOutput]

    def wait(self) -> StepOutput:
        """Raises `RuntimeError` out of launch order."""
        if self.number != self.ring.waited:
            raise RuntimeError(f"launched step {self.number} is waited for where {self.ring.waited} is next")
        output = self.finish()
        self.ring.waited += 1
        return output
