"""All weights of a model in one flat allocation: every parameter a view at a fixed, 256-byte aligned offset.

Addresses never change after start-up, so an update is one copy over the old bytes and captured graphs stay valid.
q, k and v are one parameter a layer, gate and up another; a checkpoint's names map to row ranges of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from engine.memory.memory import ALIGNMENT, Memory
from engine.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the engine: the checkpoint's tensors `parts` (HF name -> shape), one after the other."""

    name: str
    shape: Shape
    parts: dict[str, Shape]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter of a model, in the order of their use. A tied head is the embedding and has none of its own."""
    hidden, inner = config.hidden_size, config.intermediate_size
    found: list[Parameter] = []

    def add(name: str, shape: Shape, *parts: tuple[str, Shape]) -> None:
        found.append(Parameter(name, shape, dict(parts)))

    add("embedding", (config.vocab_size, hidden), (EMBEDDING, (config.vocab_size, hidden)))
    for i in range(config.num_layers):
        name, hf = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
        qkv = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
        qkv_rows = config.q_size + 2 * config.kv_size
        gate_up = (("gate_proj", inner), ("up_proj", inner))
        head = (config.head_dim,)
        add(f"{name}.input_norm", (hidden,), (f"{hf}.input_layernorm.weight", (hidden,)))
        add(f"{name}.qkv", (qkv_rows, hidden), *((f"{attention}.{p}.weight", (n, hidden)) for p, n in qkv))
        if config.qkv_bias:
            add(f"{name}.qkv_bias", (qkv_rows,), *((f"{attention}.{p}.bias", (n,)) for p, n in qkv))
        if config.qk_norm:
            norms = ((f"{attention}.q_norm.weight", head), (f"{attention}.k_norm.weight", head))
            add(f"{name}.qk_norm", (2, config.head_dim), *norms)
        add(f"{name}.o", (hidden, config.q_size), (f"{attention}.o_proj.weight", (hidden, config.q_size)))
        if config.o_bias:
            add(f"{name}.o_bias", (hidden,), (f"{attention}.o_proj.bias", (hidden,)))
        add(f"{name}.post_norm", (hidden,), (f"{hf}.post_attention_layernorm.weight", (hidden,)))
        add(f"{name}.gate_up", (2 * inner, hidden), *((f"{mlp}.{p}.weight", (n, hidden)) for p, n in gate_up))
        if config.mlp_bias:
            add(f"{name}.gate_up_bias", (2 * inner,), *((f"{mlp}.{p}.bias", (n,)) for p, n in gate_up))
        add(f"{name}.down", (hidden, inner), (f"{mlp}.down_proj.weight", (hidden, inner)))
        if config.mlp_bias:
            add(f"{name}.down_bias", (hidden,), (f"{mlp}.down_proj.bias", (hidden,)))
    add("norm", (hidden,), ("model.norm.weight", (hidden,)))
    if not config.tied:
        add("head", (config.vocab_size, hidden), (HEAD, (config.vocab_size, hidden)))
    return found


class Arena:
    """The parameters of one model in one allocation.

    flat: dtype[n], everything, padding included. parameters: engine name -> view. parts: HF name -> contiguous view
    of the rows it fills. Two arenas of one config and dtype have equal layouts, so one copies over the other whole.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, memory: Memory, tag: str, *, host: bool = False
    ) -> None:
        self.dtype = dtype
        self.parameters: dict[str, torch.Tensor] = {}
        self.parts: dict[str, torch.Tensor] = {}
        step = ALIGNMENT // dtype.itemsize
        layout = parameters(config)
        size = sum(-(-parameter.numel // step) * step for parameter in layout)
        self.flat = memory.allocate(size * dtype.itemsize, tag, host=host, pinned=host).view(dtype)
        offset = 0
        for parameter in layout:
            self.parameters[parameter.name] = self.flat[offset : offset + parameter.numel].view(parameter.shape)
            start = offset
            for hf_name, shape in parameter.parts.items():
                self.parts[hf_name] = self.flat[start : start + prod(shape)].view(shape)
                start += prod(shape)
            offset += -(-parameter.numel // step) * step

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters themselves."""
        return sum(view.nbytes for view in self.parts.values())
