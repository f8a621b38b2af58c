"""The segments of a trajectory: the one that grows, and those before it, which ended where a conversation branched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import IntArray, LogprobMode
from protocols.fields import Segment, Turn
from rollout.trajectory.tokens import Tokens

MAX_SEGMENTS = 8
"""Of one trajectory: room for the largest possible record is reserved when it starts."""


class Segments:
    """now: the tokens of the one that grows, at first the prompt's. modes, source: see `Tokens`."""

    def __init__(self, modes: tuple[LogprobMode, ...], prompt: IntArray, source: npt.NDArray[np.uint8] | None) -> None:
        self._modes = modes
        self._closed: list[tuple[Tokens, int]] = []
        self.now = Tokens(modes)
        self.now.add_prompt(prompt, source)

    @property
    def index(self) -> int:
        """Of the one that grows."""
        return len(self._closed)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token in any of them, None before the first one."""
        versions = (tokens.oldest_version for tokens in self._all())
        return min((version for version in versions if version is not None), default=None)

    def branch(self, turns: int) -> None:
        """Begin another one. turns: how many the trajectory has had."""
        self._closed.append((self.now, turns))
        self.now = Tokens(self._modes)

    def restore(self, cut: Sequence[Segment]) -> None:
        """Go on from those of a record; the prompt is there already."""
        turns = 0
        for segment in cut:
            if turns:
                self.branch(turns)
            self.now.restore(segment)
            turns += len(segment.turns)

    def values(self, turns: Sequence[Turn], *, trainable: bool, whole: bool) -> tuple[Segment, ...]:
        """turns: of the trajectory. A last one in which nothing was sampled says nothing new: left out, unless `whole`.

        Raises ValueError where two lengths disagree.
        """
        found, start = [], 0
        for tokens, end in (*self._closed, (self.now, len(turns))):
            if whole or end > start or not start:
                found.append(tokens.segment(tuple(turns[start:end]), trainable=trainable))
            start = end
        return tuple(found)

    def _all(self) -> list[Tokens]:
        return [*(tokens for tokens, _ in self._closed), self.now]
