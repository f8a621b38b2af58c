"""Tiny GGUF files, written the way llama.cpp's own converter writes a Llama model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from tests.rigs import RandModel

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h i", "Ġ hi", "1 2", "a n", "an d", "Ġ and", "u s", "e r", "us er")
TOKENS = (*CONTROL, *sorted(ByteLevel.alphabet()), *("".join(merge.split(" ")) for merge in MERGES))
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = RandModel("llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=len(TOKENS), tied=True, std=0.3)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path,
    model: RandModel = MODEL,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """`model` as one file; `kind` is the type of its matrices, norms stay float32."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(model.max_context)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_rope_freq_base(model.rope_theta)
    writer.add_rope_dimension_count(model.head_dim or model.hidden // model.heads)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.tensors().items():
        values = tensor.numpy()
        if name.endswith("q_proj.weight"):
            values = interleave(values, model.heads)
        elif name.endswith("k_proj.weight"):
            values = interleave(values, model.kv_heads)
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row 2i of a head is its row i, row 2i + 1 its row i + half."""
    out = np.empty_like(values)
    size = len(values) // heads
    for head in range(heads):
        first = head * size
        for i in range(size // 2):
            out[first + 2 * i] = values[first + i]
            out[first + 2 * i + 1] = values[first + size // 2 + i]
    return out


def gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{last}"
