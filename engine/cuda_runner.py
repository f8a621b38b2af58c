"""The device side of a step on an NVIDIA GPU. Nothing in `launch` waits for the device.

A step of decode rows is one graph replay, whatever else is an eager forward; the sampler follows, and the results
are copied into pinned memory behind an event that `wait` waits for. Everything runs on one stream, in launch order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.attention.flashinfer_paged import PagedPrefill
from engine.attention.paged_step import DecodeStep, MixedStep
from engine.attention.split import capacity
from engine.cuda_input import CudaInput
from engine.graphs import DecodeGraphs, buckets
from engine.kernels.paged_decode import DecodeScratch
from engine.kernels.sample import sample_plain
from engine.memory import KVPool, Memory
from engine.model import Model, forward, head
from engine.request import FloatArray, IntArray
from engine.runner import RING, SCORE_ROWS, Limits, ResultBuffer, StepResult
from engine.sampler import PlainLaw, Sampler
from engine.step import StepOutput, StepPlan

DecodeChoice = Literal["graph", "eager"]


@dataclass(slots=True)
class PathCounts:
    """Steps by the way they ran, and decode rows that were padding."""

    graph: int = 0
    eager: int = 0
    padding_rows: int = 0
    graph_rows: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: its results are whole in pinned memory once `done` has passed."""

    done: torch.cuda.Event
    plain: Tensor | None
    output: StepOutput | None


class CudaTicket:
    def __init__(self, runner: CudaRunner, number: int) -> None:
        self._runner = runner
        self._number = number

    def wait(self) -> StepOutput:
        return self._runner.finish(self._number)


class CudaRunner:
    """`Runner` on one GPU. decode: "graph", or "eager" to capture none."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        sampler: Sampler,
        limits: Limits,
        memory: Memory,
        decode: DecodeChoice = "graph",
    ) -> None:
        config, device = model.config, memory.device
        self.model = model
        self.kv = kv
        self.counts = PathCounts()
        self._sampler = sampler
        rows = limits.max_rows
        self._input = CudaInput(rows, limits.max_tokens, rows * limits.max_row_blocks, RING, memory)
        self._last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        # Shared by all graphs: a tensor for each would add up to gigabytes.
        self._logits = torch.empty(rows, config.vocab_size, dtype=torch.float32, device=device)
        self._scratch = DecodeScratch(
            capacity(rows), rows, config.num_heads, config.num_kv_heads, config.head_dim, device
        )
        self._prefill = PagedPrefill(config, kv.keys[0].dtype, memory, RING)
        self._results = [ResultBuffer(limits, memory) for _ in range(RING)]
        self._plain_results = [
            memory.allocate(5 * 4 * rows, "step results", host=True, pinned=True).view(torch.int32) for _ in range(RING)
        ]
        self._launched = 0
        self._waited = 0
        self._flying: deque[Launched] = deque()
        self.graphs = DecodeGraphs(buckets(rows) if decode == "graph" else (), self._decode)

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaTicket:
        """Start a step. Raises `RuntimeError` with `RING` steps launched and none of them waited for."""
        if self._launched - self._waited == RING:
            raise RuntimeError(f"{RING} steps are launched and not waited for; their buffers are in use")
        number = self._launched
        ring = number % RING
        for start in plan.starts:
            self._sampler.start(start)
        slots = plan.slots[plan.samples]
        positions = (plan.context_lens + plan.query_lens)[plan.samples]
        law = self._sampler.plain(slots, positions)
        logits, scores = self._forward(ring, plan, law)
        self._flying.append(self._sample(ring, logits, scores, law, slots, positions))
        self._launched += 1
        return CudaTicket(self, number)

    def finish(self, number: int) -> StepOutput:
        """The results of step `number`, counted from 0 in launch order, in arrays of their own."""
        if number != self._waited:
            raise RuntimeError(f"launched step {number} is waited for where {self._waited} is next")
        self._waited += 1
        step = self._flying.popleft()
        step.done.synchronize()
        return owned(step)

    def _forward(self, ring: int, plan: StepPlan, law: PlainLaw | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits fp32[S, vocab] of the sampling rows, and the prompt logprobs of the scored ones."""
        bucket = self.graphs.bucket(plan.num_rows) if plan.num_decode == plan.num_rows else None
        if bucket is not None:
            self.counts.graph += 1
            self.counts.graph_rows += bucket
            self.counts.padding_rows += bucket - plan.num_rows
            self._input.pack_decode(ring, plan, law, bucket)
            return self.graphs.replay(bucket)[: plan.num_rows], ()
        self.counts.eager += 1
        return self._eager(ring, plan, law)

    def _decode(self, rows: int) -> Tensor:
        """A decode step of `rows` rows over the fixed input arrays: what a graph captures."""
        fixed = self._input.fixed
        ids = self._last_token.index_select(0, fixed["slots"][:rows])
        attention = DecodeStep.of(fixed, rows, self._scratch)
        residual = forward(self.model, ids, fixed["positions"][:rows], fixed["write_slots"][:rows], attention, self.kv)
        return head(self.model, residual, out=self._logits[:rows])

    def _eager(self, ring: int, plan: StepPlan, law: PlainLaw | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        tokens = self._input.pack_eager(ring, plan, law)
        fixed, decodes = self._input.fixed, plan.num_decode
        decode = DecodeStep.of(fixed, decodes, self._scratch) if decodes else None
        prefill = None
        if decodes < plan.num_rows:
            indptr = plan.block_indptr[decodes:]
            blocks = fixed["block_ids"][int(indptr[0]) : int(indptr[-1])]
            queries = plan.query_lens[decodes:]
            prefill = self._prefill.plan(queries, plan.context_lens[decodes:] + queries, indptr - indptr[0], blocks)
        decoding = self._last_token.index_select(0, fixed["slots"][:decodes])
        ids = torch.cat((decoding, tokens.token_ids))
        attention = MixedStep(decode, prefill)
        residual = forward(self.model, ids, tokens.positions, tokens.write_slots, attention, self.kv)
        scores = self._score(plan, residual)
        if not len(tokens.sample_tokens):
            return residual.new_empty(0, self.vocab_size, dtype=torch.float32), scores
        return head(self.model, residual, tokens.sample_tokens), scores

    def _score(self, plan: StepPlan, residual: Tensor) -> tuple[Tensor, ...]:
        begins = np.cumsum(plan.query_lens) - plan.query_lens
        scores = []
        for score in plan.scores:
            begin, slot = int(begins[score.row]), int(plan.slots[score.row])
            parts = []
            for first in range(0, len(score.targets), SCORE_ROWS):
                targets = score.targets[first : first + SCORE_ROWS]
                span = slice(begin + first, begin + first + len(targets))
                logits = head(self.model, residual[span])
                position = int(plan.context_lens[score.row]) + first
                parts.append(self._sampler.score(logits, slot, position, targets))
            scores.append(torch.cat(parts, dim=1))
        return tuple(scores)

    def _sample(
        self,
        ring: int,
        logits: Tensor,
        scores: tuple[Tensor, ...],
        law: PlainLaw | None,
        slots: IntArray,
        positions: IntArray,
    ) -> Launched:
        rows, plain, output = len(slots), None, None
        fixed = self._input.fixed
        if rows and law is not None:
            results = sample_plain(
                logits,
                fixed["temperature"],
                fixed["greedy"],
                fixed["keys"],
                fixed["sample_slots"],
                self._last_token,
            )
            plain = self._plain_results[ring][: 5 * rows].view(5, rows)
            plain.copy_(results, non_blocking=True)
        sampled = None
        if rows and law is None:
            sampled = self._sampler.sample(logits, slots, positions)
            self._last_token.index_copy_(0, fixed["sample_slots"][:rows], sampled.token_ids)
        if sampled is not None or scores:
            output = self._results[ring].fill(StepResult(sampled, scores))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Launched(done, plain, output)


def owned(step: Launched) -> StepOutput:
    """A step's results out of the pinned buffers."""
    scores: tuple[FloatArray, ...] = ()
    if step.output is not None:
        scores = tuple(score.copy() for score in step.output.scores)
    if step.plain is not None:
        bits = step.plain.numpy().copy()
        return StepOutput(bits[0], bits[2:].view(np.float32), bits[1].astype(np.uint8), scores=scores)
    if step.output is None:
        return StepOutput(np.empty(0, np.int32), np.empty((3, 0), np.float32), np.empty(0, np.uint8))
    output = step.output
    return StepOutput(
        token_ids=output.token_ids.copy(),
        logprobs=output.logprobs.copy(),
        flags=output.flags.copy(),
        top_ids=None if output.top_ids is None else output.top_ids.copy(),
        top_logprobs=None if output.top_logprobs is None else output.top_logprobs.copy(),
        scores=scores,
    )
