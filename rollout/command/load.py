"""The real engine over a checkpoint, as the worker's options ask for it.

Where the engine has a process of its own, only that one imports torch.
"""

from __future__ import annotations

import logging
import os

from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import EngineError
from engine.handle import EngineHandle, EngineInfo
from engine.handles.process import ProcessEngine
from engine.handles.thread import ThreadEngine
from engine.model.config import ModelConfig, read_model_config
from engine.start.progress import LoggedProgress
from engine.start.recipe import EngineRecipe
from protocols.fields import ModelInfo
from rollout.chat.accept import check_at_start
from rollout.chat.format import ChatFormat
from rollout.chat.tokenizer import Tokenizer
from rollout.command import gpu
from rollout.command.advice import advice
from rollout.command.config import WorkerConfig
from rollout.command.start import Loaded, StartError
from rollout.command.summary import summarise
from rollout.environments.registry import Registry, processes_by_default
from rollout.service.service import Served

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 4096
"""Longest trajectory, in tokens, where neither the options nor the checkpoint ask for less."""


def load(config: WorkerConfig) -> Loaded:
    """The real engine over a checkpoint. Raises StartError, saying what to do."""
    _say_of_gpus(config)
    try:
        registry = environments_of(config)
        tokenizer = Tokenizer.load(config.weights)
        chat = ChatFormat.load(config.weights, tokenizer)
        if chat is not None:
            check_at_start(registry.chat_roles, chat)
        model_config = read_model_config(config.weights)
        engine_config = engine_config_of(config, model_config)
        recipe = EngineRecipe(
            {
                "path": config.weights,
                "config": engine_config,
                "dtype": config.model_dtype,
                "device": config.place,
                "decode_path": config.decode_path,
                "num_blocks": config.kv_tokens and -(-config.kv_tokens // BLOCK_SIZE) + 1,
                "kv_bytes": config.kv_memory,
                "progress": LoggedProgress(),
                "token_bytes": tokenizer.token_bytes(model_config.vocab_size) if tokenizer else None,
                "weight_version": config.weight_version,
            }
        )
        handle, info = _in_process(recipe) if config.in_process else _in_thread(recipe)
    except (EngineError, ImportError, OSError, ValueError) as error:
        raise StartError(advice(error)) from error
    if info.kv_tokens < engine_config.max_context:
        log.warning(
            "the KV cache holds %d tokens: no trajectory can be longer, though --max-context allows %d",
            info.kv_tokens,
            engine_config.max_context,
        )
    model = ModelInfo(
        architecture=info.model.architecture,
        dtype=config.model_dtype,
        vocab_size=info.model.vocab_size,
        max_context=min(engine_config.max_context, info.kv_tokens),
        eos_ids=info.model.eos_ids,
        tokenizer_hash=tokenizer.hash if tokenizer else None,
    )
    kv_tokens = info.kv_tokens if config.admission == "whole" and config.prefix_cache else None
    served = Served(model, info.weight_version, info.weight_digest, registry, tokenizer, chat, kv_tokens)
    return Loaded(handle, served, summarise(config, info, served), _processes(handle), _gpu_bytes(info))


def environments_of(config: WorkerConfig) -> Registry:
    """Raises ValueError, naming the option."""
    return Registry.load(config.env, processes=config.env_processes or processes_by_default(), tools=config.tools)


def engine_config_of(config: WorkerConfig, model: ModelConfig) -> EngineConfig:
    return EngineConfig(
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_context=config.max_context or min(DEFAULT_CONTEXT, model.max_positions),
        overlap=config.overlap,
        prefix_cache=config.prefix_cache,
    )


def _say_of_gpus(config: WorkerConfig) -> None:
    """Raises StartError if a GPU is asked for and what it takes is not installed."""
    lacking = gpu.lacking()
    if lacking and config.place == "cuda":
        raise StartError(f"--device cuda: {lacking}; or choose --device cpu")
    if lacking and config.device == "auto" and gpu.visible():
        log.warning(
            "there is a GPU, but %s; the model runs on the CPU (--device cpu says so without this line)", lacking
        )


def _processes(handle: EngineHandle) -> tuple[int, ...]:
    return (os.getpid(), handle.pid) if isinstance(handle, ProcessEngine) else (os.getpid(),)


def _gpu_bytes(info: EngineInfo) -> int:
    return sum(size for device, _, size in info.memory if device.startswith("cuda"))


def _in_process(recipe: EngineRecipe) -> tuple[EngineHandle, EngineInfo]:
    engine = ProcessEngine(recipe)
    return engine, engine.info


def _in_thread(recipe: EngineRecipe) -> tuple[EngineHandle, EngineInfo]:
    built = recipe.build()
    return ThreadEngine(built.engine, built.weights), built.info
