"""Does the worker work? Told by what was last seen of its two loops, from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from engine.handle import EngineStats

PATIENCE_S = 30.0
"""How old a sign of life may be: longer than any step, a model on a slow CPU in its longest prefill perhaps aside."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What the event loop saw when it last came round. time, reported_at: `time.monotonic()`.

    state: of the worker. version: committed, as clients are told. stats: the engine's last report, of `reported_at`.
    """

    time: float
    state: str
    version: int
    stats: EngineStats
    reported_at: float

    @property
    def busy(self) -> bool:
        """Should the engine make steps?"""
        return self.stats.running + self.stats.waiting > 0 and not self.stats.paused


@dataclass(frozen=True, slots=True)
class Verdict:
    good: bool
    why: str


class Health:
    """patience: seconds that a sign of life may be old."""

    def __init__(self, patience: float = PATIENCE_S) -> None:
        self._patience = patience
        self._last: Beat | None = None
        self._progress = 0.0

    def beat(self, beat: Beat) -> None:
        last = self._last
        if last is None or not beat.busy or beat.stats.steps_total != last.stats.steps_total:
            self._progress = beat.time
        self._last = beat

    def alive(self, now: float) -> Verdict:
        """The event loop turns, and the engine makes steps or, where it has none to make, answers."""
        beat = self._last
        if beat is None:
            return Verdict(True, "starting")
        if beat.state == "dead":
            return Verdict(False, "the engine died")
        if (age := now - beat.time) > self._patience:
            return Verdict(False, f"the event loop has not come round for {age:.0f} s")
        if beat.busy and (age := now - self._progress) > self._patience:
            return Verdict(False, f"the engine has work and made no step for {age:.0f} s")
        # At the end the engine is closed before the last results are taken over: nobody asks it any more.
        if beat.state != "draining" and (age := now - beat.reported_at) > self._patience:
            return Verdict(False, f"the engine has not answered for {age:.0f} s")
        return Verdict(True, f"{beat.stats.steps_total} steps, {'running' if beat.busy else 'idle'}")

    def ready(self, now: float) -> Verdict:
        """It takes work, and the version that was committed is the one that serves."""
        beat, alive = self._last, self.alive(now)
        if beat is None or not alive.good:
            return Verdict(False, alive.why)
        if beat.state not in ("ready", "updating"):
            return Verdict(False, beat.state)
        if beat.stats.weight_version != beat.version:
            return Verdict(False, f"version {beat.version} is committed, {beat.stats.weight_version} serves")
        return Verdict(True, f"version {beat.version} serves")
