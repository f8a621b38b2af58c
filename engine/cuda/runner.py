"""The device side of a step on an NVIDIA GPU. Nothing in `launch` waits for the device.

A step of decode rows is one graph replay; one that holds prompt tokens is a replay in pieces with attention between
them, or, where it has many, launched kernel by kernel. The sampler follows, and the results are copied into pinned
memory behind an event that `wait` waits for. Everything runs on one stream, in launch order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from engine.attention.flashinfer_paged import PagedPrefill
from engine.attention.paged_step import DecodeStep, MixedStep, choose_decode_kernel
from engine.attention.split import capacity, num_streams
from engine.attention.torch_paged import AttentionStep
from engine.cuda.graphs import DecodeGraphs, buckets
from engine.cuda.input import TOKEN_ARRAYS, CudaInput
from engine.cuda.pieces import MixedGraphs, token_buckets
from engine.cuda.sampler import CudaSampler, StepLaw
from engine.kernels.paged_decode import DecodeScratch
from engine.memory.memory import KVPool, Memory
from engine.model.model import Model, forward, head
from engine.request import IntArray
from engine.runner.input import prompt_scores
from engine.runner.result_buffer import ResultBuffer, StepResult, owned
from engine.runner.ring import RING, Ring, RingTicket
from engine.runner.torch_runner import Limits
from engine.sampling.prompt_scores import score_prompt
from engine.sampling.sampler import Sampled
from engine.start.progress import Progress, silent
from engine.step import StepOutput, StepPlan

DecodeChoice = Literal["graph", "eager"]


@dataclass(frozen=True, slots=True)
class Path:
    """How a step went. padding: tokens that its graphs ran beside its own; None for an eager step. split: attention cut
    rows into parts."""

    padding: int | None
    split: bool


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way: its results are whole in pinned memory once `done` has passed.

    packed: int32[5, S] of the sampler, whatever the laws; None where a row wants alternatives. With it `output` has
        only scores.
    """

    done: torch.cuda.Event
    packed: Tensor | None
    output: StepOutput
    path: Path


class CudaRunner:
    """`Runner` on one GPU. decode: "graph", or "eager" to capture none."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        sampler: CudaSampler,
        limits: Limits,
        memory: Memory,
        decode: DecodeChoice = "graph",
        progress: Progress = silent,
    ) -> None:
        config, device = model.config, memory.device
        self.model = model
        self.kv = kv
        self._sampler = sampler
        rows = limits.max_rows
        streams = num_streams(config.num_kv_heads)
        self._input = CudaInput(rows, limits.max_tokens, rows * limits.max_row_blocks, streams, RING, memory)
        self._last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        # Shared by all graphs: a tensor for each would add up to gigabytes.
        self._logits = torch.empty(rows, config.vocab_size, dtype=torch.float32, device=device)
        self._scratch = DecodeScratch(
            capacity(rows, streams), rows, config.num_heads, config.num_kv_heads, config.head_dim, device
        )
        self._attention = choose_decode_kernel(config.num_heads, config.num_kv_heads, config.head_dim, kv.keys[0].dtype)
        self._prefill = PagedPrefill(config, kv.keys[0].dtype, memory, RING)
        self._results = [ResultBuffer(rows, limits.max_tokens, memory) for _ in range(RING)]
        self._packed_results = [
            memory.allocate(5 * 4 * rows, "step results", host=True, pinned=True).view(torch.int32) for _ in range(RING)
        ]
        self._ring = Ring()
        self._flying: deque[Launched] = deque()
        captured = decode == "graph"
        self.graphs = DecodeGraphs(buckets(rows) if captured else (), self._decode, progress)
        sizes = token_buckets(limits.max_tokens) if captured else []
        attended = torch.zeros(max(sizes, default=0), config.q_size, dtype=kv.keys[0].dtype, device=device)
        self.mixed = MixedGraphs(sizes, self._pass, attended, progress)

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RingTicket:
        """Start a step. Raises `RuntimeError` with `RING` steps launched and none of them waited for."""
        ring = self._ring.claim()
        for start in plan.starts:
            self._sampler.start(start)
        slots = plan.slots[plan.samples]
        positions = (plan.context_lens + plan.query_lens)[plan.samples]
        law = self._sampler.law(slots, positions)
        logits, scores, path = self._forward(ring, plan, law)
        self._flying.append(self._sample(ring, logits, scores, law, slots, path))
        return self._ring.launch(self._finish)

    def _finish(self) -> StepOutput:
        step = self._flying.popleft()
        step.done.synchronize()
        padding = step.path.padding
        output = replace(
            owned(step.output), graph=padding is not None, split=step.path.split, padding_tokens=padding or 0
        )
        if step.packed is not None:
            bits = step.packed.numpy().copy()
            output = replace(
                output, token_ids=bits[0], flags=bits[1].astype(np.uint8), logprobs=bits[2:].view(np.float32)
            )
        return output

    def _forward(self, ring: int, plan: StepPlan, law: StepLaw) -> tuple[Tensor, tuple[Tensor, ...], Path]:
        """Logits fp32[S, vocab] of the sampling rows, and the prompt logprobs of the scored ones."""
        bucket = self.graphs.bucket(plan.num_rows) if plan.num_decode == plan.num_rows else None
        if bucket is not None:
            split = self._input.pack_decode(ring, plan, law, bucket)
            return self.graphs.replay(bucket)[: plan.num_rows], (), Path(bucket - plan.num_rows, split)
        return self._mixed(ring, plan, law)

    def _decode(self, rows: int) -> Tensor:
        """A decode step of `rows` rows over the fixed input arrays: what a graph captures."""
        fixed = self._input.fixed
        ids = self._last_token.index_select(0, fixed["slots"][:rows])
        attention = DecodeStep.of(fixed, rows, self._attention, self._scratch)
        residual = forward(self.model, ids, fixed["positions"][:rows], fixed["write_slots"][:rows], attention, self.kv)
        return head(self.model, residual, out=self._logits[:rows])

    def _mixed(self, ring: int, plan: StepPlan, law: StepLaw) -> tuple[Tensor, tuple[Tensor, ...], Path]:
        """Decode rows and prompt tokens, or decode rows without a graph."""
        count, decodes, fixed = plan.num_tokens, plan.num_decode, self._input.fixed
        bucket = self.mixed.bucket(count)
        split, sample_tokens = self._input.pack_mixed(ring, plan, law, bucket or count)
        torch.index_select(self._last_token, 0, fixed["slots"][:decodes], out=fixed["token_ids"][:decodes])
        attention = self._attention_of(plan)
        if bucket is None:
            residual = self._pass(count, attention)
        else:
            residual = self.mixed.of(bucket).run(count, attention, self.kv)
        scores = tuple(score_prompt(self.model, self._sampler, score, residual) for score in prompt_scores(plan))
        path = Path(None if bucket is None else bucket - count, split)
        if not len(sample_tokens):
            return residual.new_empty(0, self.vocab_size, dtype=torch.float32), scores, path
        return head(self.model, residual, sample_tokens), scores, path

    def _pass(self, tokens: int, attention: AttentionStep) -> Tensor:
        """All layers over so many tokens of the fixed input arrays: what pieces capture."""
        ids, positions, write_slots = (self._input.fixed[name][:tokens] for name in TOKEN_ARRAYS)
        return forward(self.model, ids, positions, write_slots, attention, self.kv)

    def _attention_of(self, plan: StepPlan) -> MixedStep:
        decodes, fixed = plan.num_decode, self._input.fixed
        decode = DecodeStep.of(fixed, decodes, self._attention, self._scratch) if decodes else None
        prefill = None
        if decodes < plan.num_rows:
            indptr = plan.block_indptr[decodes:]
            blocks = fixed["block_ids"][int(indptr[0]) : int(indptr[-1])]
            queries = plan.query_lens[decodes:]
            prefill = self._prefill.plan(queries, plan.context_lens[decodes:] + queries, indptr - indptr[0], blocks)
        return MixedStep(decode, prefill)

    def _sample(
        self,
        ring: int,
        logits: Tensor,
        scores: tuple[Tensor, ...],
        law: StepLaw,
        slots: IntArray,
        path: Path,
    ) -> Launched:
        rows = len(slots)
        packed = sampled = None
        if rows:
            top = self._sampler.alternatives(logits, slots) if law.alternatives else None
            results = self._sampler.draw(logits, slots, law, self._input.fixed, self._last_token)
            if top is None:
                packed = self._packed_results[ring][: 5 * rows].view(5, rows)
                packed.copy_(results, non_blocking=True)
            else:
                sampled = Sampled(results[0], results[2:].view(torch.float32), results[1], *top)
        output = self._results[ring].fill(StepResult(sampled, scores))
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Launched(done, packed, output, path)
