"""What a step left on the device, copied to the host into memory that is taken once and used again."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.config import MAX_TOP_LOGPROBS
from engine.memory.memory import Memory
from engine.request import LOGPROB_MODES
from engine.sampling.sampler import Sampled
from engine.step import StepOutput


@dataclass(frozen=True, slots=True)
class StepResult:
    """On the device. sampled: None when no row samples. scores: float32[3, q] per `ScoreChunk`."""

    sampled: Sampled | None
    scores: tuple[Tensor, ...]


class ResultBuffer:
    """Host memory for the results of one step of up to `max_rows` rows and `max_tokens` query tokens."""

    def __init__(self, max_rows: int, max_tokens: int, memory: Memory) -> None:

        def array(dtype: torch.dtype, *shape: int) -> Tensor:
            nbytes = prod(shape) * dtype.itemsize
            return memory.allocate(nbytes, "step results", host=True, pinned=True).view(dtype).view(shape)

        modes = len(LOGPROB_MODES)
        self._token_ids = array(torch.int32, max_rows)
        self._flags = array(torch.uint8, max_rows)
        self._logprobs = array(torch.float32, modes, max_rows)
        self._top_ids = array(torch.int32, max_rows * MAX_TOP_LOGPROBS)
        self._top_logprobs = array(torch.float32, max_rows * MAX_TOP_LOGPROBS)
        self._scores = array(torch.float32, modes, max_tokens)

    def fill(self, result: StepResult) -> StepOutput:
        """Start the copies. The arrays of the answer are views of this buffer, whole once the copies are done."""
        sampled = result.sampled
        scores, end = [], 0
        for score in result.scores:
            scores.append(_copy(self._scores[:, end : end + score.shape[1]], score))
            end += score.shape[1]
        if sampled is None:
            none = slice(0, 0)
            return _output(self._token_ids[none], self._logprobs[:, none], self._flags[none], None, None, scores)
        count = len(sampled.token_ids)
        top_ids = top_logprobs = None
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            shape = sampled.top_ids.shape
            top_ids = _copy(self._top_ids[: shape.numel()].view(shape), sampled.top_ids)
            top_logprobs = _copy(self._top_logprobs[: shape.numel()].view(shape), sampled.top_logprobs)
        return _output(
            _copy(self._token_ids[:count], sampled.token_ids),
            _copy(self._logprobs[:, :count], sampled.logprobs),
            _copy(self._flags[:count], sampled.flags),
            top_ids,
            top_logprobs,
            scores,
        )


def owned(output: StepOutput) -> StepOutput:
    """The same in arrays of its own."""
    return StepOutput(
        token_ids=output.token_ids.copy(),
        logprobs=output.logprobs.copy(),
        flags=output.flags.copy(),
        top_ids=None if output.top_ids is None else output.top_ids.copy(),
        top_logprobs=None if output.top_logprobs is None else output.top_logprobs.copy(),
        scores=tuple(score.copy() for score in output.scores),
    )


def _copy(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source, non_blocking=True)


def _output(
    token_ids: Tensor,
    logprobs: Tensor,
    flags: Tensor,
    top_ids: Tensor | None,
    top_logprobs: Tensor | None,
    scores: list[Tensor],
) -> StepOutput:
    return StepOutput(
        token_ids=token_ids.numpy(),
        logprobs=logprobs.numpy(),
        flags=flags.numpy(),
        top_ids=None if top_ids is None else top_ids.numpy(),
        top_logprobs=None if top_logprobs is None else top_logprobs.numpy(),
        scores=tuple(score.numpy() for score in scores),
    )
