"""The real engine over a checkpoint, as the worker's options ask for it. Imports torch."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter

import torch
import zmq

from engine.build import DTYPES, LoadedEngine, load_engine
from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import EngineError
from engine.memory import kv_blocks_in
from engine.model_config import ModelConfig, read_model_config
from engine.thread import ThreadEngine
from protocols.fields import ModelInfo
from rollout.config import WorkerConfig
from rollout.environments.registry import Registry
from rollout.service import Served
from rollout.start import Loaded, StartError
from rollout.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
"""Longest trajectory, in tokens, where neither the options nor the checkpoint ask for less."""


def load(config: WorkerConfig) -> Loaded:
    """The real engine over a checkpoint. Raises StartError, saying what to do."""
    try:
        registry = Registry.load(config.env)
        tokenizer = Tokenizer.load(config.weights)
        model_config = read_model_config(config.weights)
        engine_config = EngineConfig(
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            max_context=config.max_context or min(DEFAULT_CONTEXT, model_config.max_positions),
            overlap=config.overlap,
            prefix_cache=config.prefix_cache,
        )
        blocks = _blocks(config, engine_config, model_config)
        # What cannot fit into the whole cache, even alone, is to be refused at submit.
        context = min(engine_config.max_context, (blocks - 1) * BLOCK_SIZE)
        loaded = load_engine(
            config.weights,
            dataclasses.replace(engine_config, max_context=context),
            dtype=config.dtype,
            device=config.device,
            num_blocks=blocks,
            token_bytes=tokenizer.token_bytes(model_config.vocab_size) if tokenizer else None,
            weight_version=config.weight_version,
        )
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise StartError(str(error)) from error
    model = ModelInfo(
        architecture=model_config.architecture,
        dtype=config.dtype,
        vocab_size=model_config.vocab_size,
        max_context=context,
        eos_ids=model_config.eos_ids,
        tokenizer_hash=tokenizer.hash if tokenizer else None,
    )
    served = Served(model, config.weight_version, loaded.weights.digest, registry, tokenizer)
    return Loaded(ThreadEngine(loaded.engine, loaded.weights), served, _summary(config, loaded, served))


def _blocks(config: WorkerConfig, engine: EngineConfig, model: ModelConfig) -> int:
    """KV blocks, the dummy included: as asked for, or what all slots can need within half of free memory."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // BLOCK_SIZE) + 1
    itemsize = DTYPES[config.dtype].itemsize
    if config.kv_memory is not None:
        return kv_blocks_in(config.kv_memory, model, itemsize)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(engine.max_running * engine.max_blocks_per_request + 1, kv_blocks_in(free // 2, model, itemsize))


def _summary(config: WorkerConfig, loaded: LoadedEngine, served: Served) -> tuple[str, ...]:
    model, capacity = served.model, (loaded.kv.num_blocks - 1) * BLOCK_SIZE
    return (
        f"model    {config.weights}: {model.architecture}, {model.dtype} on {config.device}, {model.vocab_size} ids",
        f"weights  version {served.weight_version}, {served.weight_digest}",
        f"KV cache {capacity} tokens; {config.max_running} requests at once, context {model.max_context}",
        f"memory   {', '.join(f'{tag} {size / 1e6:,.1f} MB' for tag, size in _memory(loaded))}",
        f"envs     {', '.join(served.environments.names)}",
        f"versions Python {platform.python_version()}, torch {torch.__version__}, libzmq {zmq.zmq_version()}",
    )


def _memory(loaded: LoadedEngine) -> list[tuple[str, int]]:
    """Bytes by what they are for, the largest first."""
    sizes: Counter[str] = Counter()
    for allocation in loaded.memory.allocations:
        sizes[allocation.tag] += allocation.nbytes
    return sizes.most_common()
