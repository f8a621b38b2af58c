"""One trajectory a round, scored again in one piece: were its logprobs those of the distribution it came from?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import numpy as np

from protocols.errors import RolloutError
from protocols.fields import SOURCE_SAMPLED, Record
from protocols.replies import Scored
from protocols.requests import Score
from rollout.metrics.observer import Round
from rollout.metrics.rounds import WHOLE
from rollout.metrics.row import ROUND_AXIS, Row

log = logging.getLogger(__name__)

NAME = "rollout/self_logprob_abs_diff"
WAITING = 8
"""Rounds that wait for their score; older ones go without."""


class SelfCheck:
    """put: gets a row of its own for each round, which may be later than the round's."""

    def __init__(self, put: Callable[[Row], None]) -> None:
        self._put = put
        self._taken: set[Round] = set()
        self._waiting: deque[tuple[Round, Record]] = deque(maxlen=WAITING)
        self._offered = asyncio.Event()

    def offer(self, batch: Round, record: Record, version: int) -> None:
        """The first one of each round that can be compared is taken: sampled under the weights that serve, whole."""
        if batch in self._taken or record.purpose == "eval" or record.status not in WHOLE or len(record.segments) > 1:
            return
        versions = record.segments[0].weight_versions
        if len(versions) == 0 or (versions[:, 0] != version).any():
            return
        self._taken.add(batch)
        self._waiting.append((batch, record))
        self._offered.set()

    def close(self, batch: Round) -> None:
        self._taken.discard(batch)

    async def run(self, score: Callable[[Score], Awaitable[Scored]]) -> None:
        """Until cancelled."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            while self._waiting:
                batch, record = self._waiting.popleft()
                try:
                    found = difference(record, await score(question(record)))
                except RolloutError as error:
                    log.info("the self-check of step %d could not be made: %s", batch.step, error)
                    continue
                if found is not None:
                    self._put(Row("round", time.time(), {ROUND_AXIS: batch.step, NAME: found}))


def question(record: Record) -> Score:
    segment, law = record.segments[0], record.sampling
    return Score(
        id="self-check",
        sequences=(segment.token_ids,),
        sampled=((segment.source == SOURCE_SAMPLED).astype(np.uint8),),
        sampling=law.model_copy(update={"logprobs": law.logprobs[:1], "top_logprobs": 0, "prompt_logprobs": False}),
    )


def difference(record: Record, scored: Scored) -> float | None:
    """Mean over the sampled tokens, in nats. None: other weights serve meanwhile."""
    segment = record.segments[0]
    if (segment.weight_versions[:, 0] != scored.weight_version).any():
        return None
    sampled = segment.source == SOURCE_SAMPLED
    again = scored.logprobs[record.sampling.logprobs[0]][0]
    return float(np.abs(again[sampled] - segment.logprobs[sampled]).mean())
