"""The checkpoint: whether it is whole, whether it fits, and what of it text needs. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import EngineError
from engine.memory.free_memory import host_bytes
from engine.memory.kv_size import kv_bytes_per_block
from engine.model.config import ModelConfig, read_model_config
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat
from rollout.chat.template import ChatTemplate
from rollout.chat.tokenizer import FILE as TOKENIZER
from rollout.chat.tokenizer import Tokenizer
from rollout.command import gpu
from rollout.command.advice import advice
from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding, gigabytes
from rollout.command.load import engine_config_of

ITEMSIZE = {"float32": 4, "bfloat16": 2}


def check(config: WorkerConfig) -> Iterator[Finding]:
    try:
        model = read_model_config(config.weights)
        wanted = engine_config_of(config, model)
    except (EngineError, ValueError, OSError) as error:
        yield Finding("fail", "checkpoint", advice(error))
        return
    if wanted.max_context > model.max_positions:
        yield Finding(
            "fail",
            "context",
            f"{wanted.max_context} is above the checkpoint's {model.max_positions}",
            "lower --max-context",
        )
    yield Finding(
        "ok",
        "checkpoint",
        f"{config.weights}: {model.architecture}, {model.num_layers} layers, "
        f"{model.vocab_size} ids, context {wanted.max_context} of {model.max_positions}",
    )
    yield from weights(config, model)
    yield from room(config, model, wanted)
    yield from text(config, model)


def weights(config: WorkerConfig, model: ModelConfig) -> Iterator[Finding]:
    """Are all files and tensors there, in the shapes that config.json promises?"""
    from engine.weights.arena import parameters
    from engine.weights.checkpoint import opened

    shapes = {name: shape for parameter in parameters(model) for name, shape in parameter.parts.items()}
    try:
        with opened(config.weights, shapes) as files:
            size = sum(file.path.stat().st_size for file in files)
            count = sum(len(file.entries) for file in files)
    except EngineError as error:
        yield Finding("fail", "weights", advice(error))
        return
    yield Finding(
        "ok",
        "weights",
        f"{len(files)} file{'s' * (len(files) != 1)}, {gigabytes(size)}, {count} tensors of the right shapes",
    )


def room(config: WorkerConfig, model: ModelConfig, wanted: EngineConfig) -> Iterator[Finding]:
    """Do weights and KV cache fit, on the host and on the GPU?"""
    from engine.weights.arena import parameters

    itemsize = ITEMSIZE[config.model_dtype]
    size = itemsize * sum(parameter.numel for parameter in parameters(model))
    on_gpu = config.place == "cuda"
    host = size if on_gpu else 2 * size
    yield fits("host room", host, host_bytes(), "for weights being loaded" if on_gpu else "for weights, twice")
    free = _gpu_free() if on_gpu else (host_bytes() - host) // 2
    if free is None:
        return
    if on_gpu:
        yield fits("GPU room", size, free, "for weights")
        free -= size
    block = kv_bytes_per_block(model, itemsize)
    asked = config.kv_memory or (config.kv_tokens and -(-config.kv_tokens // BLOCK_SIZE) * block)
    if asked is not None:
        yield fits("KV cache", asked, max(free, 0), "as asked for")
        return
    whole = wanted.max_running * wanted.max_blocks_per_request * block
    least = wanted.max_blocks_per_request * block
    found = (
        f"about {min(max(free, 0), whole) // block * BLOCK_SIZE:,} tokens; "
        f"{wanted.max_running} of {wanted.max_context} would be {whole // block * BLOCK_SIZE:,}"
    )
    if free < least:
        yield Finding("fail", "KV cache", found, "not one longest trajectory fits: lower --max-context")
    elif free < whole:
        yield Finding("ok", "KV cache", f"{found}, of which the cache holds what fits")
    else:
        yield Finding("ok", "KV cache", found)


def fits(what: str, need: int, free: int, purpose: str) -> Finding:
    found = f"{gigabytes(need)} {purpose}, {gigabytes(free)} left"
    if need > free:
        return Finding("fail", what, found, "free some, or take a smaller model")
    return Finding("ok", what, found)


def _gpu_free() -> int | None:
    """Bytes; None where the GPU cannot be asked, which another check says."""
    if gpu.lacking() is not None:
        return None
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def text(config: WorkerConfig, model: ModelConfig) -> Iterator[Finding]:
    try:
        tokenizer = Tokenizer.load(config.weights)
        template = ChatTemplate.load(config.weights)
        chat = ChatFormat.load(config.weights, tokenizer)
    except (ValueError, OSError) as error:
        yield Finding("fail", "tokenizer", advice(error))
        return
    if tokenizer is None:
        yield Finding(
            "warn",
            "tokenizer",
            f"the checkpoint has no {TOKENIZER}",
            "stop strings, text and chat need it; token ids do not",
        )
    elif (highest := highest_id(config.weights / TOKENIZER)) >= model.vocab_size:
        yield Finding(
            "warn",
            "tokenizer",
            f"{TOKENIZER} has ids up to {highest}, the model up to {model.vocab_size - 1}",
            "text may become ids that are refused: take the tokenizer that belongs to the weights",
        )
    else:
        yield Finding("ok", "tokenizer", f"{TOKENIZER}, {tokenizer.hash[:19]}")
    if template is None:
        yield Finding("warn", "chat template", "the checkpoint has none", "chat needs it; token ids do not")
    elif chat is not None:
        try:
            chat.form().prompt([{"role": "user", "content": "hello"}])
        except ChatError as error:
            yield Finding("warn", "chat template", str(error), "chat needs it; token ids do not")
        else:
            yield Finding("ok", "chat template", "it renders a message")


def highest_id(file: Path) -> int:
    return max(FastTokenizer.from_file(str(file)).get_vocab().values(), default=-1)
