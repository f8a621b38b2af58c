"""Tiny legal checkpoints for tests, and what the transformers library says about them.

RAND: random weights, large enough that outputs depend on context. TABLE: logits depend only on the last token.
Both are plain Hugging Face directories: config.json, safetensors (one file, or shards with an index) and, if asked
for, generation_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file

Architecture = Literal["qwen3", "qwen2", "llama"]
HF_CLASS = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class RandModel:
    """A random checkpoint. `qk_std` None means `std` for Qwen3 and 0.1 for the others: without q/k norms larger
    scores make transformers differ from itself by more than the tests' tolerance. `head_dim` None leaves it out
    of config.json (then it is hidden / heads)."""

    architecture: Architecture = "qwen3"
    seed: int = 0
    std: float = 0.4
    qk_std: float | None = None
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = 32
    intermediate: int = 128
    vocab: int = 512
    tied: bool = False
    max_context: int = 4096
    rope_theta: float = 1_000_000.0
    rope_scaling: Mapping[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    dtype: torch.dtype = torch.float32
    eos: int | list[int] | None = None

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [HF_CLASS[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) if self.rope_scaling else None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
            "bos_token_id": None,
            "eos_token_id": self.eos,
        }
        if self.head_dim is not None:
            config["head_dim"] = self.head_dim
        if self.architecture != "qwen2":
            config["attention_bias"] = False
        return config

    def tensors(self) -> dict[str, torch.Tensor]:
        """HF name -> tensor in `dtype`; without lm_head.weight when tied."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, std: float = self.std, mean: float = 0.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * std + mean).to(self.dtype)

        head_dim = self.head_dim or self.hidden // self.heads
        qk_std = self.qk_std if self.qk_std is not None else self.std if self.architecture == "qwen3" else 0.1
        tensors = {"model.embed_tokens.weight": normal(self.vocab, self.hidden)}
        for layer in range(self.layers):
            attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
            q_rows, kv_rows = self.heads * head_dim, self.kv_heads * head_dim
            tensors |= {
                f"{attention}.q_proj.weight": normal(q_rows, self.hidden, std=qk_std),
                f"{attention}.k_proj.weight": normal(kv_rows, self.hidden, std=qk_std),
                f"{attention}.v_proj.weight": normal(kv_rows, self.hidden),
                f"{attention}.o_proj.weight": normal(self.hidden, q_rows),
                f"{mlp}.gate_proj.weight": normal(self.intermediate, self.hidden),
                f"{mlp}.up_proj.weight": normal(self.intermediate, self.hidden),
                f"{mlp}.down_proj.weight": normal(self.hidden, self.intermediate),
                f"model.layers.{layer}.input_layernorm.weight": normal(self.hidden, std=0.1, mean=1.0),
                f"model.layers.{layer}.post_attention_layernorm.weight": normal(self.hidden, std=0.1, mean=1.0),
            }
            if self.architecture == "qwen3":
                tensors |= {
                    f"{attention}.q_norm.weight": normal(head_dim, std=0.1, mean=1.0),
                    f"{attention}.k_norm.weight": normal(head_dim, std=0.1, mean=1.0),
                }
            if self.architecture == "qwen2":
                tensors |= {
                    f"{attention}.q_proj.bias": normal(q_rows, std=qk_std),
                    f"{attention}.k_proj.bias": normal(kv_rows, std=qk_std),
                    f"{attention}.v_proj.bias": normal(kv_rows),
                }
        tensors["model.norm.weight"] = normal(self.hidden, std=0.1, mean=1.0)
        if not self.tied:
            tensors["lm_head.weight"] = normal(self.vocab, self.hidden)
        return tensors


def write_rand(
    path: Path,
    model: RandModel | None = None,
    *,
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a RAND checkpoint into `path` (made if need be) and return it."""
    model = model or RandModel()
    return write_checkpoint(path, model.config(), model.tensors(), shards, generation_config)


def write_table(
    path: Path,
    rows: np.ndarray[Any, Any],
    state_of: Mapping[int, int] | None = None,
    *,
    eos: int | list[int] | None = None,
    max_context: int = 4096,
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
    hidden: int = 64,
    head_dim: int = 32,
) -> Path:
    """Write a TABLE checkpoint: a Qwen3 whose logits after token i are `rows[state_of.get(i, 0)]`, to about 1e-6.

    rows: [states <= hidden, V]. The layers are real but add nothing (o_proj and down_proj are 0); the embedding of a
    token is sqrt(hidden) times the unit vector of its state, which the final norm leaves as it is. A logit beyond
    float32's range (1e39) comes out as an infinity although every weight is finite.
    """
    states, vocab = rows.shape
    shape = RandModel(layers=2, hidden=hidden, head_dim=head_dim, vocab=vocab, eos=eos, max_context=max_context)
    if states > shape.hidden:
        raise ValueError(f"{states} states do not fit in {shape.hidden}")
    scale = float(np.sqrt(shape.hidden))
    state = np.zeros(vocab, np.int64)
    for token, token_state in (state_of or {}).items():
        state[token] = token_state
    tensors = RandModel(layers=shape.layers, hidden=hidden, head_dim=head_dim, vocab=1).tensors()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding = torch.zeros(vocab, shape.hidden)
    embedding[torch.arange(vocab), torch.from_numpy(state)] = scale
    head = torch.zeros(vocab, shape.hidden)
    head[:, :states] = torch.from_numpy((np.asarray(rows, np.float64) / scale).T.astype(np.float32))
    tensors |= {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(shape.hidden),
    }
    return write_checkpoint(path, shape.config(), tensors, shards, generation_config)


def script(vocab: int, steps: Sequence[tuple[int, int]], other: float = 0.0) -> tuple[np.ndarray, dict[int, int]]:
    """`rows` and `state_of` for `write_table` that force `steps`: (token, next token) pairs, at a logit of 30 over
    `other`. Tokens without a step have a flat row."""
    rows = np.full((len(steps) + 1, vocab), other, np.float32)
    state_of = {}
    for state, (token, following) in enumerate(steps, start=1):
        state_of[token] = state
        rows[state, following] = 30.0
    return rows, state_of


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face directory of these tensors, split in order into `shards` files of about equal tensor counts."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for shard, part in enumerate(np.array_split(np.arange(len(names)), shards), start=1):
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        held = {names[i]: tensors[names[i]] for i in part}
        save_file(held, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return path


class Reference:
    """The transformers library on a checkpoint: float32, CPU, eager attention, no KV cache."""

    def __init__(self, path: Path) -> None:
        # Imported here: tests that only write checkpoints need not wait for it.
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32[L, V]: row i is what follows token_ids[:i + 1]."""
        ids = torch.tensor([list(token_ids)], dtype=torch.int64)
        return self._model(input_ids=ids, use_cache=False).logits[0].float().numpy()

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float32[L]: entry i scores token_ids[i] given token_ids[:i]; entry 0 is NaN."""
        rows = torch.from_numpy(self.logits(token_ids)).double() / temperature
        table = torch.log_softmax(rows[:-1], dim=-1)
        following = torch.tensor(list(token_ids)[1:])[:, None]
        picked = table.gather(1, following)[:, 0]
        return np.concatenate([[np.nan], picked.numpy()]).astype(np.float32)

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The next `count` ids by argmax, each from a full forward."""
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(token_ids) :]
