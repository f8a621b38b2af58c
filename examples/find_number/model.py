"""The agent: a Qwen3 of 75,648 random weights, as a checkpoint directory that the worker can read.

python -m examples.find_number.model DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from examples.find_number.environment import VOCABULARY


def make_model(seed: int) -> PreTrainedModel:
    """The same weights for the same seed, in float32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            # A turn is one token long, whatever it is: there is no end-of-sequence token.
            bos_token_id=None,
            eos_token_id=None,
        )
    )


if __name__ == "__main__":
    make_model(seed=0).save_pretrained(Path(sys.argv[1]))
