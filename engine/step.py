"""The values that cross the seam between the host side (scheduler, loop) and the device side (runner).

`StepPlan -> Ticket -> StepOutput`. A plan is numpy only, holds no token id for rows whose token is still in
flight, and is never written after it was launched. `StepOutput` owns its arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.request import BoolArray, FloatArray, IntArray, LogprobMode, SamplingParams

NONFINITE = 1
"""`StepOutput.flags` bit: the row's logits were not finite."""
EMPTY_SUPPORT = 2
"""`StepOutput.flags` bit: no id was left to sample from."""


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request takes a slot (first admission, or again after preemption): set the slot's sampling state.

    token_ids: int32[L], every id known so far; sampled: bool[L], which of them were sampled in any turn.
    Penalty counts are rebuilt from these two; afterwards the sampler alone adds what it writes.
    """

    slot: int
    params: SamplingParams
    token_ids: IntArray
    sampled: BoolArray
    logprob_modes: tuple[LogprobMode, ...]
    top_logprobs: int


@dataclass(frozen=True, slots=True)
class ScoreChunk:
    """Score the ids that follow each query position of one prefill row.

    targets: int32[q]; targets[j] is the id after the row's j-th query token, the next chunk's first id for the
    last one, and -1 where nothing follows (the end of the prompt).
    """

    row: int
    targets: IntArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. R rows, decode rows first, then prefill chunks.

    starts: slots that begin with this step, to be set up before it runs.
    slots: int32[R]. num_decode: rows [0, num_decode) read their one token from `last_token[slot]` on the device.
    context_lens: int32[R], tokens whose KV is in the cache before this step; the row's queries sit at absolute
        positions [context_lens, context_lens + query_lens).
    query_lens: int32[R], 1 for decode rows.
    token_ids: int32[T], the query tokens of the prefill rows, concatenated in row order.
    block_indptr: int32[R + 1], block_ids: int32[N]: row r's KV blocks, in order, covering context and queries.
    samples: bool[R]: the row's last query position samples a token, written to `last_token[slot]`.
    scores: prompt-logprob work of this step, in row order.
    """

    step: int
    starts: tuple[SlotStart, ...]
    slots: IntArray
    num_decode: int
    context_lens: IntArray
    query_lens: IntArray
    token_ids: IntArray
    block_indptr: IntArray
    block_ids: IntArray
    samples: BoolArray
    scores: tuple[ScoreChunk, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of the S sampling rows of a plan, in row order.

    token_ids: int32[S], always inside the vocabulary (0 where flagged). flags: uint8[S].
    logprobs: float32[3, S] in the order of LOGPROB_MODES; a mode that the row did not ask for may be NaN.
    top_ids, top_logprobs: int32[S, k], float32[S, k], k the largest asked for in this step; None when 0.
    scores: one float32[3, q] per `ScoreChunk`; NaN where the target is -1.
    graph: the step was a replay of captured graphs. split: attention cut long rows into parts. padding_tokens: that
        the graphs ran beside the step's own, to fill their bucket; a row that decodes is one.
    """

    token_ids: IntArray
    logprobs: FloatArray
    flags: npt.NDArray[np.uint8]
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    scores: tuple[FloatArray, ...] = ()
    graph: bool = False
    split: bool = False
    padding_tokens: int = 0


class Ticket(Protocol):
    """A launched step."""

    def wait(self) -> StepOutput:
        """Block until the step is done. Called once, in launch order."""


class Runner(Protocol):
    """The device side of a step. `launch` may return before the work is done; steps run in launch order."""

    @property
    def num_blocks(self) -> int:
        """KV blocks, block 0 (the dummy, never handed out) included."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head: ids are valid in [0, vocab_size)."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Start one step."""


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """What `prepare` found. digest: "algorithm:hex" over sorted HF names, shapes and bytes in the worker's dtype."""

    version: int
    digest: str
    nbytes: int
    seconds: float


class WeightStore(Protocol):
    """Prepared, then committed. `prepare` may run on another thread while steps run; `commit` may not."""

    @property
    def digest(self) -> str:
        """Digest of what serves now."""

    def prepare(self, path: str, version: int, checksums: dict[str, str] | None) -> WeightsInfo:
        """Read and check a checkpoint into memory of our own. Raises `WeightsError`; nothing that serves changes."""

    def commit(self) -> None:
        """Copy what was prepared over what serves, in place. The pipe must be empty."""

    def discard(self) -> None:
        """Forget what was prepared; a no-op when there is nothing."""
