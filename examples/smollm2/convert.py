"""From GGUF to a checkpoint directory: config.json, safetensors in float32, tokenizer and chat template.

    python -m examples.smollm2.convert FILE.gguf DIRECTORY

For the Llama architecture with SmolLM's tokenizer. The file's keys: the GGUF specification,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, TokenType, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float32]

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, directory: Path) -> Path:
    """Write a checkpoint into `directory` (made) and return it. Raises ValueError for what is not supported.

    Holds the whole model in memory once, in float32: dequantised values do not fit into fewer bits.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, supported in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if fields.get(name) != supported:
            raise ValueError(f"{gguf}: {name} {fields.get(name)!r} is not supported, only {supported!r}")
    tensors = read_tensors(reader, fields)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    ends = {name: fields.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")}
    write_json(directory / "config.json", config(fields, tied="lm_head.weight" not in tensors) | ends)
    write_json(directory / "generation_config.json", ends)
    tokenizer(fields).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(fields))
    return directory


def read_tensors(reader: GGUFReader, fields: Mapping[str, Any]) -> dict[str, Array]:
    """HF name -> float32 array of HF's shape and row order."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(values)
    return tensors


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in OUTER:
        return OUTER[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in INNER:
        raise ValueError(f"tensor {name!r} is not part of a Llama model")
    return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[3]}"


def unpermute(values: Array, heads: int) -> Array:
    """Undo the row order that llama.cpp gives q and k: [heads * head_dim, hidden] in and out.

    Its rope turns neighbouring rows (2i, 2i + 1) of a head, Hugging Face's turns rows i and i + head_dim / 2; so
    that both compute the same, a GGUF file holds each head's two halves interleaved.
    """
    rows, hidden = values.shape
    return values.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 9.99999975e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        # GGUF names its pre-tokenizer only ("smollm"): GPT-2's, with every digit a piece of its own before it.
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return made


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in roles.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.get("tokenizer.chat_template"),
        **{role: tokens[i] for role, i in ids.items() if i is not None},
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
