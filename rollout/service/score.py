"""`score`: logprobs of given ids, under one version of the weights."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from engine.request import Completion, Request
from protocols.errors import Internal
from protocols.fields import Limits, ModelInfo
from protocols.replies import Scored
from protocols.requests import Score
from rollout.generation.async_engine import AsyncEngine
from rollout.generation.failures import wire_error
from rollout.service.checks import check_score
from rollout.trajectory.sampling import engine_params

FIRST = -1
"""Order in the engine: a trainer waits for a score, so it goes before trajectories that wait."""


class Scorer:
    def __init__(self, engine: AsyncEngine, model: ModelInfo, limits: Limits) -> None:
        self._engine = engine
        self._model = model
        self._limits = limits
        self._numbers = itertools.count()

    async def score(self, message: Score) -> Scored:
        """Raises BadRequest, PromptTooLong, and what the engine found wrong with a sequence."""
        check_score(message, model=self._model, limits=self._limits)
        done: list[Completion | None] = [None] * len(message.sequences)
        while missing := [i for i, completion in enumerate(done) if completion is None]:
            fresh = await asyncio.gather(*(self._engine.generate(self._request(message, i)) for i in missing))
            for i, completion in zip(missing, fresh, strict=True):
                if completion.error is not None:
                    failure = wire_error(completion.error)
                    raise type(failure)(failure.message, field=f"sequences[{i}]", scope=failure.scope)
                if completion.finish_reason != "abort_weight_update":
                    done[i] = completion
            # A commit may have come between: what was scored under older weights is scored again.
            newest = max((completion.kv_version for completion in done if completion is not None), default=0)
            done = [completion if completion and completion.kv_version == newest else None for completion in done]
        scored = [completion for completion in done if completion is not None]
        logprobs = {}
        for mode in message.sampling.logprobs:
            logprobs[mode] = tuple(
                scores[mode]
                for completion, ids in zip(scored, message.sequences, strict=True)
                if (scores := completion.prompt_logprobs) is not None and len(scores[mode]) == len(ids)
            )
            if len(logprobs[mode]) < len(scored):
                raise Internal("the engine did not score every token")
        return Scored(id=message.id, weight_version=scored[0].kv_version, logprobs=logprobs)

    def _request(self, message: Score, index: int) -> Request:
        sampled = None if message.sampled is None else message.sampled[index].astype(np.bool_)
        return Request(
            id=f"score/{next(self._numbers)}",
            token_ids=message.sequences[index],
            max_tokens=0,
            params=engine_params(message.sampling, seed=0, sample_index=0),
            sampled=sampled,
            order=FIRST,
            logprob_modes=message.sampling.logprobs,
            prompt_logprobs=True,
        )
