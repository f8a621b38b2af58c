"""The linears of a decode step alone on the GPU: every shape over the batch, and all of a model, in CUDA graphs.

    python -m bench.linears [--shape qwen3-4b] [--rows 1 2 4 8 16 32] [--json FILE]

`cublas` is the product alone; `apart` has the norm, the gate and the add to the residual in launches of their own;
`fused` is what `CudaOps` makes of it: for few rows one launch of `engine.kernels.skinny_linear`, of more rows one of
`engine.kernels.gate_up` for gate and up. Every layer has weights of its own, so the L2 holds none of them. Microseconds
of one layer, the median of replays; TB/s of weights. The last lines are whole steps without attention: embedding, all
layers with rope and the write of k and v, and the head, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu_time import median_us
from bench.make_model import SHAPES
from engine.cuda.ops import CudaOps
from engine.memory.memory import KVPool, Memory
from engine.model.config import parse_model_config
from engine.model.model import Layer, Model, build_model, forward, head
from engine.weights.arena import Arena

Call = Callable[[], Any]
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class NoAttention:
    """In the place of an attention step: what would be attended to is the query itself."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ARG002
        return q.flatten(1)


def random_model(shape: str, ops: CudaOps, arena: Arena | None = None) -> tuple[Model, Arena]:
    config = parse_model_config(SHAPES[shape])
    memory = Memory(DEVICE)
    if arena is None:
        arena = Arena(config, torch.bfloat16, memory, "weights")
        for piece in arena.flat.split(2**28):
            piece.normal_(0.0, 0.02)
        for name, parameter in arena.parameters.items():
            if "norm" in name:
                parameter.fill_(1.0)
    return build_model(config, arena, ops, positions=1024), arena


def replay_us(calls: Sequence[Call]) -> tuple[float, list[Any]]:
    """Microseconds of one call in a graph of all, and what the calls of the last replay returned."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return median_us(graph.replay, len(calls)), results


def op_calls(model: Model, ops: CudaOps, op: str, rows: int) -> list[Call]:
    """One call a layer of what the model does with one weight."""
    config, eps = model.config, model.config.rms_norm_eps
    generator = torch.Generator(DEVICE).manual_seed(rows)

    def draw(width: int) -> Tensor:
        return torch.randn(rows, width, device=DEVICE, generator=generator).bfloat16()

    residual, attended, inner = draw(config.hidden_size), draw(config.q_size), draw(config.intermediate_size)
    x = ops.norm(residual, model.norm, eps)
    calls: dict[str, Callable[[Layer], Any]] = {
        "qkv": lambda layer: ops.linear(x, layer.qkv, layer.qkv_bias),
        "o": lambda layer: ops.linear_add_norm(attended, layer.o, layer.o_bias, residual, layer.post_norm, eps),
        "gate_up": lambda layer: ops.gate_up(x, layer.gate_up, layer.gate_up_bias),
        "down": lambda layer: ops.linear_add_norm(inner, layer.down, layer.down_bias, residual, layer.post_norm, eps),
    }
    if op == "head":
        return [lambda: ops.head_fp32(x, model.head)] * 4
    return [partial(calls[op], layer) for layer in model.layers]


def cublas_calls(model: Model, op: str, rows: int) -> list[Call]:
    weights = [model.head] * 4 if op == "head" else [getattr(layer, op) for layer in model.layers]
    x = torch.randn(rows, weights[0].shape[1], device=DEVICE).bfloat16()
    if op == "head":
        return [partial(torch.mm, x, w.t(), out_dtype=torch.float32) for w in weights]
    return [partial(functional.linear, x, w) for w in weights]


def step_call(model: Model, rows: int) -> Call:
    """A decode step of `rows` rows without its attention, up to the logits."""
    kv = KVPool(model.config, 2, torch.bfloat16, Memory(DEVICE))
    ids, positions = torch.arange(rows, device=DEVICE) + 7, torch.arange(rows, device=DEVICE)
    slots = torch.arange(rows, device=DEVICE) % 16 + 16

    def call() -> Tensor:
        return head(model, forward(model, ids, positions, slots, NoAttention(), kv))

    return call


def show(row: dict[str, Any]) -> None:
    print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 192, 256])
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    config = parse_model_config(SHAPES[args.shape])
    apart, fused = CudaOps(config, fused=False), CudaOps(config, fused=True)
    with torch.inference_mode():
        model, arena = random_model(args.shape, apart)
        fused_model, _ = random_model(args.shape, fused, arena)
        found = []
        for op in ("qkv", "o", "gate_up", "down", "head"):
            nbytes = (model.head if op == "head" else getattr(model.layers[0], op)).nbytes
            for rows in args.rows:
                row: dict[str, Any] = {"op": op, "rows": rows}
                row["cublas_us"], _ = replay_us(cublas_calls(model, op, rows))
                row["apart_us"], _ = replay_us(op_calls(model, apart, op, rows))
                row["fused_us"], _ = replay_us(op_calls(model, fused, op, rows))
                row["fused_tb_s"] = nbytes / row["fused_us"] / 1e6
                found.append(row)
                show(row)
        for rows in args.rows:
            apart_us, logits = replay_us([step_call(model, rows)])
            fused_us, others = replay_us([step_call(fused_model, rows)])
            difference = float((others[0] - logits[0]).norm() / logits[0].norm())
            assert difference < 0.1, f"the two ways differ by {difference} of the logits"
            row = {"op": "step", "rows": rows, "apart_ms": apart_us / 1e3, "fused_ms": fused_us / 1e3}
            found.append(row)
            show(row)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
