"""The decoder as plain functions: Qwen3, and Qwen2 and Llama by flags. Order of the code is order of the events.

A step is a function of (weights, KV pool, input); nothing is kept between steps but the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.attention.torch_paged import AttentionStep
from engine.memory.memory import KVPool
from engine.model.config import ModelConfig
from engine.model.ops import Ops
from engine.model.rope import rope_table
from engine.weights.arena import Arena


@dataclass(frozen=True, slots=True)
class Layer:
    """Views into the arena. Fused rows: qkv is [q, k, v], gate_up is [gate, up], qk_norm is [2, head_dim]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Model:
    """Everything a forward pass needs beside its input and the KV pool. rope: see `rope_table`."""

    config: ModelConfig
    ops: Ops[Any]
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    rope: Tensor


def build_model(config: ModelConfig, arena: Arena, ops: Ops[Any], positions: int) -> Model:
    """A model over an arena, for sequences of up to `positions` tokens."""
    found = arena.parameters
    layers = tuple(
        Layer(**{field: found.get(f"layers.{i}.{field}") for field in Layer.__slots__})  # type: ignore[arg-type]
        for i in range(config.num_layers)
    )
    return Model(
        config=config,
        ops=ops,
        embedding=found["embedding"],
        layers=layers,
        norm=found["norm"],
        head=found["embedding"] if config.tied else found["head"],
        rope=rope_table(config, positions, arena.flat.device),
    )


def forward(
    model: Model, ids: Tensor, positions: Tensor, write_slots: Tensor, attention: AttentionStep, kv: KVPool
) -> Tensor:
    """All layers over T tokens (int64[T] each): writes their KV and returns the residual, dtype[T, hidden], which is
    the input of the final norm."""
    ops, eps = model.ops, model.config.rms_norm_eps
    rope = model.rope.index_select(0, positions)
    residual = ops.embedding(ids, model.embedding)
    x = ops.norm(residual, model.layers[0].input_norm, eps)
    for i, layer in enumerate(model.layers):
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
        q = ops.qk_norm_rope_write(qkv, layer.qk_norm, eps, rope, write_slots, kv.keys[i], kv.values[i])
        x = attention.attend(q, kv.keys[i], kv.values[i])
        x = ops.linear_add_norm(x, layer.o, layer.o_bias, residual, layer.post_norm, eps)
        x = ops.gate_up(x, layer.gate_up, layer.gate_up_bias)
        if i + 1 == len(model.layers):
            ops.linear_add(x, layer.down, layer.down_bias, residual)
        else:
            next_norm = model.layers[i + 1].input_norm
            x = ops.linear_add_norm(x, layer.down, layer.down_bias, residual, next_norm, eps)
    return residual


def head(model: Model, residual: Tensor, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Logits fp32[rows, vocab] of chosen tokens, gathered before the final norm; None is all of them. out: where the
    logits go, if given."""
    if rows is not None:
        residual = residual.index_select(0, rows)
    x = model.ops.norm(residual, model.norm, model.config.rms_norm_eps)
    return model.ops.head_fp32(x, model.head, out)
