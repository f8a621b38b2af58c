"""The largest steps that can come, and some of few tokens, run once before anything is served.

What does not fit into memory then fails at start-up and not under load, and the kernels of eager steps are compiled.
These steps read and write the dummy block alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine.config import BLOCK_SIZE
from engine.request import LOGPROB_MODES, SamplingParams
from engine.runner.torch_runner import Limits
from engine.start.progress import WARMING, Progress
from engine.step import Runner, ScoreChunk, SlotStart, StepPlan

FILTERED = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1)
"""Takes every part of the sampler."""

FEW_TOKENS = (1, 2, 16, 17, 256)
"""Over so many rows the head may be kernels that no larger step runs; where nothing is captured, all else, too."""


def warm_up(runner: Runner, limits: Limits, max_context: int, progress: Progress) -> None:
    """Run the steps of `largest_steps` one by one. max_context: longest sequence, in tokens."""
    plans = list(largest_steps(limits, max_context))
    for done, plan in enumerate(plans, start=1):
        runner.launch(plan).wait()
        progress(WARMING, done, len(plans))


def largest_steps(limits: Limits, max_context: int) -> Iterator[StepPlan]:
    """Few tokens in one row, at the end of the longest context (attention has another kernel for these), scored, so
    that the head runs over as many; most tokens in one row, likewise; most rows that sample, filtered and not; decode
    rows beside a prefill of the rest of the tokens."""
    for few in FEW_TOKENS:
        if few <= min(limits.max_tokens, max_context - 1):
            yield _plan([0], 0, [max_context - 1 - few], [few], SamplingParams(), scored=True)
    chunk = min(limits.max_tokens, max_context - 1)
    yield _plan([0], 0, [max_context - 1 - chunk], [chunk], FILTERED, scored=True)
    rows = min(limits.max_rows, limits.max_tokens)
    share = min(limits.max_tokens // rows, max_context - 1)
    for params in (FILTERED, SamplingParams()):
        yield _plan(range(rows), 0, [0] * rows, [share] * rows, params)
    if rows > 1:
        chunk = min(limits.max_tokens - rows + 1, max_context - 1)
        contexts, queries = [max_context - 2] * (rows - 1) + [0], [1] * (rows - 1) + [chunk]
        yield _plan(range(rows), rows - 1, contexts, queries, SamplingParams())


def _plan(
    slots: Sequence[int],
    num_decode: int,
    contexts: Sequence[int],
    queries: Sequence[int],
    params: SamplingParams,
    *,
    scored: bool = False,
) -> StepPlan:
    """All rows sample; every block is the dummy."""
    nobody = np.zeros(0, np.int32)
    held = [-(-(context + count) // BLOCK_SIZE) for context, count in zip(contexts, queries, strict=True)]
    return StepPlan(
        step=0,
        starts=tuple(SlotStart(slot, params, nobody, nobody.astype(np.bool_), LOGPROB_MODES, 0) for slot in slots),
        slots=np.array(slots, np.int32),
        num_decode=num_decode,
        context_lens=np.array(contexts, np.int32),
        query_lens=np.array(queries, np.int32),
        token_ids=np.zeros(sum(queries[num_decode:]), np.int32),
        block_indptr=np.cumsum([0, *held], dtype=np.int32),
        block_ids=np.zeros(sum(held), np.int32),
        samples=np.ones(len(slots), np.bool_),
        scores=(ScoreChunk(0, np.zeros(queries[0], np.int32)),) if scored else (),
    )
