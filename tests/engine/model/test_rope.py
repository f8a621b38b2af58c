from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model.config import parse_model_config
from engine.model.rope import rope_table
from tests.rigs import RandModel

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("scaling", [None, LLAMA3 | {"original_max_position_embeddings": 8192}])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_the_table_is_transformers_to_the_last_position(
    theta: float, scaling: dict[str, Any] | None, head_dim: int
) -> None:
    """Bit for bit: an angle rounded otherwise is off by 1e-3 at position 32,767."""
    raw = RandModel("llama", head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_context=32_768).config()
    found = rope_table(parse_model_config(raw), 32_768, CPU)
    assert found.dtype == torch.float32
    assert found.shape == (32_768, 2, head_dim)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**raw))
    positions = torch.tensor([[0, 1, 2, 100, 4095, 8191, 8192, 20_000, 32_767]])
    cos, sin = theirs(torch.zeros(1), positions)
    half = head_dim // 2
    assert torch.equal(found[positions[0], 0], cos[0])
    assert torch.equal(found[positions[0], 1, half:], sin[0, :, half:])
    assert torch.equal(found[positions[0], 1, :half], -sin[0, :, :half])


def test_scaling_changes_only_the_slow_frequencies() -> None:
    scaling = LLAMA3 | {"original_max_position_embeddings": 64}
    plain = rope_table(parse_model_config(RandModel("llama").config()), 200, CPU)
    scaled = rope_table(parse_model_config(RandModel("llama", rope_scaling=scaling).config()), 200, CPU)
    same = (plain == scaled).all(dim=0).all(dim=0)[:16]
    assert same[0]
    assert not same[-1]
