"""The device side of a step: pack the plan, run the model, sample, bring the results home.

The sampled token reaches the next step on the device, through `last_token[slot]`; the host learns it when it waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.memory.memory import KVPool, Memory
from engine.model.model import Model, forward, head
from engine.runner.input import StepBuffer, StepInput
from engine.runner.result_buffer import ResultBuffer, StepResult, owned
from engine.runner.ring import RING, Ring, RingTicket
from engine.sampling.prompt_scores import score_prompt
from engine.sampling.sampler import Sampler
from engine.step import StepOutput, StepPlan


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: rows, query tokens, and KV blocks of one row."""

    max_rows: int
    max_tokens: int
    max_row_blocks: int


class StepDevice:
    """Runs packed steps, in order: the model, the sampler, and the state that lives on the device between steps."""

    def __init__(
        self, model: Model, kv: KVPool, attention: TorchPagedAttention, sampler: Sampler, max_rows: int
    ) -> None:
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
        scores = tuple(score_prompt(self.model, self._sampler, score, residual) for score in step.scores)
        if not step.num_samples:
            return StepResult(None, scores)
        rows = None if step.num_samples == step.num_tokens and not step.scores else step.sample_tokens
        logits = head(self.model, residual, rows)
        sampled = self._sampler.sample(logits, step.host_sample_slots, step.host_sample_positions)
        self._last_token.index_copy_(0, step.sample_slots, sampled.token_ids)
        return StepResult(sampled, scores)


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
        self._results = [ResultBuffer(limits.max_rows, limits.max_tokens, memory) for _ in range(RING)]
        self._ring = Ring()
        self._pending: deque[StepInput] = deque()
        self._outputs: deque[StepOutput] = deque()

    @property
    def num_blocks(self) -> int:
        return self._device.kv.num_blocks

    @property
    def vocab_size(self) -> int:
        return self._device.model.config.vocab_size

    def launch(self, plan: StepPlan) -> RingTicket:
        """Start a step. Raises `RuntimeError` with `RING` steps launched and none of them waited for."""
        self._pending.append(self._inputs[self._ring.claim()].pack(plan))
        ticket = self._ring.launch(self._finish)
        if not self._lazy:
            self._run_next()
        return ticket

    def _finish(self) -> StepOutput:
        if not self._outputs:
            self._run_next()
        return owned(self._outputs.popleft())

    def _run_next(self) -> None:
        number = self._ring.launched - len(self._pending)
        result = self._device.run(self._pending.popleft())
        self._outputs.append(self._results[number % RING].fill(result))
