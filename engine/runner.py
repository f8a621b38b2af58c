"""The device side of a step: pack the plan, run the model, sample, bring the results home.

The sampled token reaches the next step on the device, through `last_token[slot]`; the host learns it when it waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from engine.attention.torch_paged import Attention
from engine.config import MAX_TOP_LOGPROBS
from engine.memory import KVPool, Memory
from engine.model import Model, forward, head
from engine.request import LOGPROB_MODES
from engine.sampler import Sampled, Sampler
from engine.step import StepOutput, StepPlan
from engine.step_input import Score, StepBuffer, StepInput

RING = 3
"""Steps that may be launched and not yet waited for, and so the number of input and result buffers."""

SCORE_ROWS = 512
"""Rows of the head at a time for prompt logprobs: bounds the logits held at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: rows, query tokens, and KV blocks of one row."""

    max_rows: int
    max_tokens: int
    max_row_blocks: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step left on the device. sampled: None when no row samples. scores: float32[3, q] per `Score`."""

    sampled: Sampled | None
    scores: tuple[Tensor, ...]


class StepDevice:
    """Runs packed steps, in order: the model, the sampler, and the state that lives on the device between steps."""

    def __init__(self, model: Model, kv: KVPool, attention: Attention, sampler: Sampler, max_rows: int) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention
        self._sampler = sampler
        self._last_token = torch.zeros(max_rows, dtype=torch.int64, device=model.embedding.device)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepResult:
        """One step, up to its results on the device. No value of the device is read on the host."""
        for start in step.starts:
            self._sampler.start(start)
        decoding = self._last_token.index_select(0, step.slots[: step.num_decode])
        ids = torch.cat((decoding, step.token_ids)) if step.chunks else decoding
        residual = forward(self.model, ids, step.positions, step.write_slots, self.attention.plan(step), self.kv)
        scores = tuple(self._score(score, residual) for score in step.scores)
        if not step.num_samples:
            return StepResult(None, scores)
        rows = None if step.num_samples == step.num_tokens and not step.scores else step.sample_tokens
        logits = head(self.model, residual, rows)
        sampled = self._sampler.sample(logits, step.host_sample_slots, step.host_sample_positions)
        self._last_token.index_copy_(0, step.sample_slots, sampled.token_ids)
        return StepResult(sampled, scores)

    def _score(self, score: Score, residual: Tensor) -> Tensor:
        parts = []
        for first in range(0, len(score.targets), SCORE_ROWS):
            targets = score.targets[first : first + SCORE_ROWS]
            span = slice(score.start + first, score.start + first + len(targets))
            logits = head(self.model, residual[span])
            parts.append(self._sampler.score(logits, score.slot, score.position + first, targets))
        return torch.cat(parts, dim=1)


class ResultBuffer:
    """Host memory for the results of one step."""

    def __init__(self, limits: Limits, memory: Memory) -> None:
        rows, modes = limits.max_rows, len(LOGPROB_MODES)

        def array(dtype: torch.dtype, *shape: int) -> Tensor:
            return (
                memory.allocate(
                    prod(shape) * dtype.itemsize, "step results", host=True, pinned=memory.device.type == "cuda"
                )
                .view(dtype)
                .view(shape)
            )

        self._token_ids = array(torch.int32, rows)
        self._flags = array(torch.uint8, rows)
        self._logprobs = array(torch.float32, modes, rows)
        self._top_ids = array(torch.int32, rows * MAX_TOP_LOGPROBS)
        self._top_logprobs = array(torch.float32, rows * MAX_TOP_LOGPROBS)
        self._scores = array(torch.float32, modes, limits.max_tokens)

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


class TorchTicket:
    """A launched step of a `TorchRunner`."""

    def __init__(self, runner: TorchRunner, number: int) -> None:
        self._runner = runner
        self._number = number

    def wait(self) -> StepOutput:
        return self._runner.finish(self._number)


class TorchRunner:
    """`Runner` on the CPU, where a step is done when `launch` returns.

    lazy: a step runs only when it is waited for, and reads its input buffer then, as a device that lags behind the
    host would. Input and result buffers are shared by every third step in both modes.
    """

    def __init__(self, device: StepDevice, limits: Limits, memory: Memory, *, lazy: bool = False) -> None:
        self._device = device
        self._lazy = lazy
        blocks = limits.max_rows * limits.max_row_blocks
        self._inputs = [StepBuffer(limits.max_rows, limits.max_tokens, blocks, memory) for _ in range(RING)]
        self._results = [ResultBuffer(limits, memory) for _ in range(RING)]
        self._launched = 0
        self._waited = 0
        self._pending: deque[StepInput] = deque()
        self._outputs: deque[StepOutput] = deque()

    @property
    def num_blocks(self) -> int:
        return self._device.kv.num_blocks

    @property
    def vocab_size(self) -> int:
        return self._device.model.config.vocab_size

    def launch(self, plan: StepPlan) -> TorchTicket:
        """Start a step. Raises `RuntimeError` with `RING` steps launched and none of them waited for."""
        if self._launched - self._waited == RING:
            raise RuntimeError(f"{RING} steps are launched and not waited for; their buffers are in use")
        number = self._launched
        self._pending.append(self._inputs[number % RING].pack(plan))
        self._launched += 1
        if not self._lazy:
            self._run_next()
        return TorchTicket(self, number)

    def finish(self, number: int) -> StepOutput:
        """The results of step `number`, counted from 0 in launch order, in arrays of their own."""
        if number != self._waited:
            raise RuntimeError(f"launched step {number} is waited for where {self._waited} is next")
        if not self._outputs:
            self._run_next()
        self._waited += 1
        return _owned(self._outputs.popleft())

    def _run_next(self) -> None:
        number = self._launched - len(self._pending)
        result = self._device.run(self._pending.popleft())
        self._outputs.append(self._results[number % RING].fill(result))


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


def _owned(output: StepOutput) -> StepOutput:
    return StepOutput(
        token_ids=output.token_ids.copy(),
        logprobs=output.logprobs.copy(),
        flags=output.flags.copy(),
        top_ids=None if output.top_ids is None else output.top_ids.copy(),
        top_logprobs=None if output.top_logprobs is None else output.top_logprobs.copy(),
        scores=tuple(score.copy() for score in output.scores),
    )
