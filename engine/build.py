"""From a checkpoint's path to an engine that is ready to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.memory import KVPool, Memory, kv_blocks_in
from engine.model import build_model
from engine.model_config import ModelConfig, read_model_config
from engine.ops import TorchOps
from engine.runner import Limits, StepDevice, TorchRunner
from engine.sampler import Sampler
from engine.update import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what else its owner needs: the weight store, the checkpoint's config, the memory plan."""

    engine: Engine
    weights: Weights
    model_config: ModelConfig
    memory: Memory
    kv: KVPool


def load_engine(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    token_bytes: Sequence[bytes] | None = None,
    weight_version: int = 0,
    checksums: dict[str, str] | None = None,
    lazy: bool = False,
) -> LoadedEngine:
    """Load a checkpoint directory and build an engine over it.

    dtype: "float32" or "bfloat16", of weights and KV. num_blocks: blocks of the KV pool, block 0 (the dummy)
    included, or kv_bytes: a budget for it; by default every slot can hold the longest context. lazy: see
    `TorchRunner`. Raises `WeightsError` for a checkpoint that is refused, `OutOfMemory` when the plan does not fit.
    """
    config = config or EngineConfig()
    if dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    if device != "cpu":
        raise EngineError(f"device {device!r} is not supported; only cpu is", field="device")
    kind, place = DTYPES[dtype], torch.device(device)
    model_config = read_model_config(Path(path))
    if config.max_context > model_config.max_positions:
        raise EngineError(
            f"max_context {config.max_context} is above the checkpoint's {model_config.max_positions} positions",
            field="max_context",
        )
    if num_blocks is None:
        whole = config.max_running * config.max_blocks_per_request + 1
        num_blocks = whole if kv_bytes is None else kv_blocks_in(kv_bytes, model_config, kind.itemsize)

    memory = Memory(place)
    weights = Weights(model_config, kind, memory)
    weights.prepare(str(path), weight_version, checksums)
    weights.commit()
    kv = KVPool(model_config, num_blocks, kind, memory)
    model = build_model(model_config, weights.arena, TorchOps(), config.max_context)
    sampler = Sampler(model_config.vocab_size, config.max_running, place)
    attention = TorchPagedAttention(model_config, kind, place)
    limits = Limits(config.max_running, config.max_step_tokens, config.max_blocks_per_request)
    runner = TorchRunner(StepDevice(model, kv, attention, sampler, config.max_running), limits, memory, lazy=lazy)
    engine = Engine(runner, config, token_bytes, weight_version=weight_version)
    return LoadedEngine(engine, weights, model_config, memory, kv)
