"""`StepPlan`s made by hand, and a runner to give them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.memory.memory import KVPool, Memory
from engine.model.config import ModelConfig, read_model_config
from engine.model.model import build_model
from engine.model.ops import Ops, TorchOps
from engine.request import LOGPROB_MODES, SamplingParams
from engine.runner.torch_runner import Limits, StepDevice, TorchRunner
from engine.sampling.sampler import Sampler
from engine.step import ScoreChunk, SlotStart, StepPlan
from engine.weights.update import Weights

CPU = torch.device("cpu")
LIMITS = Limits(max_rows=8, max_tokens=704, max_row_blocks=44)


@dataclass(frozen=True)
class Row:
    """token_ids None is a decode row. targets: what to score each of the row's queries against."""

    slot: int
    context: int
    blocks: Sequence[int]
    token_ids: Sequence[int] | None = None
    samples: bool = True
    targets: Sequence[int] | None = None


def plan(*rows: Row, starts: Sequence[SlotStart] = (), step: int = 0) -> StepPlan:
    """Decode rows must come first."""
    chunks = [row.token_ids for row in rows if row.token_ids is not None]
    ends = np.cumsum([len(row.blocks) for row in rows])
    return StepPlan(
        step=step,
        starts=tuple(starts),
        slots=np.array([row.slot for row in rows], np.int32),
        num_decode=len(rows) - len(chunks),
        context_lens=np.array([row.context for row in rows], np.int32),
        query_lens=np.array([1 if row.token_ids is None else len(row.token_ids) for row in rows], np.int32),
        token_ids=np.array([i for chunk in chunks for i in chunk], np.int32),
        block_indptr=np.array([0, *ends], np.int32),
        block_ids=np.array([block for row in rows for block in row.blocks], np.int32),
        samples=np.array([row.samples for row in rows], np.bool_),
        scores=tuple(
            ScoreChunk(i, np.array(row.targets, np.int32)) for i, row in enumerate(rows) if row.targets is not None
        ),
    )


def start(
    slot: int, token_ids: Sequence[int] = (), params: SamplingParams | None = None, top_logprobs: int = 0
) -> SlotStart:
    known = np.array(token_ids, np.int32)
    params = params or SamplingParams(temperature=0.0)
    return SlotStart(slot, params, known, np.zeros(len(known), np.bool_), LOGPROB_MODES, top_logprobs)


def device_on(
    config: ModelConfig, weights: Weights, memory: Memory, ops: Ops[Any] | None = None, blocks: int = 60
) -> StepDevice:
    place, dtype = memory.device, weights.arena.dtype
    kv = KVPool(config, blocks, dtype, memory)
    kv.data.fill_(float("nan"))
    model = build_model(config, weights.arena, ops or TorchOps(), LIMITS.max_row_blocks * 16)
    attention = TorchPagedAttention(config, dtype, place)
    return StepDevice(model, kv, attention, Sampler(config.vocab_size, LIMITS.max_rows, place), LIMITS.max_rows)


def load_device(path: Path, ops: Ops[Any] | None = None) -> StepDevice:
    config, memory = read_model_config(path), Memory(CPU)
    weights = Weights(config, torch.float32, memory)
    weights.prepare(str(path), 0, None)
    weights.commit()
    return device_on(config, weights, memory, ops)


def runner_on(device: StepDevice, *, lazy: bool = False) -> TorchRunner:
    return TorchRunner(device, LIMITS, Memory(CPU), lazy=lazy)
