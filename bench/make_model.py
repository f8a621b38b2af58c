"""Checkpoints with random weights in the shapes that are measured: bf16 safetensors shards and a config.json.

    python -m bench.make_model --shape qwen3-4b --out DIR [--std 0.02]

Speed does not depend on what the weights say. Norms are ones; all else is normal with standard deviation `std`,
drawn on the GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.config import parse_model_config
from engine.weights.arena import Shape, parameters

SHARD_BYTES = 3 * 10**9
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": [151645, 151643],
    "torch_dtype": "bfloat16",
}


def _shape(hidden: int, inner: int, layers: int, heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    return QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **more,
    }


TINY = {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 512, "eos_token_id": [1]}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, False),
    "tiny": _shape(64, 128, 2, 4, True, **TINY),
}


def make_model(shape: str, out: Path, *, std: float = 0.02, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Write a checkpoint of `SHAPES[shape]` to the directory `out`. Returns the bytes of its files."""
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(SHAPES[shape], shard_bytes))
    home: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _draw(key, size, std, generator).cpu() for key, size in shard.items()}
        save_file(tensors, out / name, metadata={"format": "pt"})
        home |= dict.fromkeys(tensors, name)
    total = sum((out / name).stat().st_size for name in set(home.values()))
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return total


def _shards(config: dict[str, Any], shard_bytes: int) -> Iterator[dict[str, Shape]]:
    """HF names and shapes, for each file."""
    shard: dict[str, Shape] = {}
    size = 0
    for parameter in parameters(parse_model_config(config)):
        shard |= parameter.parts
        size += 2 * parameter.numel
        if size >= shard_bytes:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _draw(name: str, shape: Shape, std: float, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    empty = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return empty.normal_(0.0, std, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    size = make_model(args.shape, args.out, std=args.std, seed=args.seed)
    print(f"{args.out}: {args.shape}, {size / 1e9:.3f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
