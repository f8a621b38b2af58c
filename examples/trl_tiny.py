"""What both TRL examples train: a Qwen3 of 90,000 random weights that is to write letters, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OBSERVATION = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
"""What the environment says after the first turn of each trajectory, in both examples."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and those of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Float32; the same weights for the same seed. Its head is tied to the embedding, as in Qwen3's small models."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save(tokenizer: PreTrainedTokenizerFast, seed: int, folder: Path) -> Path:
    make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_dataset() -> Dataset:
    words = ["apple", "river", "stone", "cloud", "piano", "tiger", "lemon", "winter"]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Write about {word}."}] for word in words]})


def letters(text: str) -> float:
    """The reward: which share of the text is lower-case letters."""
    return sum("a" <= letter <= "z" for letter in text) / max(len(text), 1)
