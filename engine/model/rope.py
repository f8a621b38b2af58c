"""The rope table: cos and sin of every position, fp32, as transformers computes them."""

from __future__ import annotations

import math

import torch

from engine.model.config import Llama3Scaling, ModelConfig


def rope_table(config: ModelConfig, positions: int, device: torch.device) -> torch.Tensor:
    """fp32[positions, 2, head_dim]: row p holds cos, and sin with its first half negated.

    Angles are fp32 products position * frequency, not rounded from higher precision: the trainer's model has these
    angles, and at position 30,000 the exact ones differ from them by 1e-3.
    """
    dim = config.head_dim
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.rope_scaling is not None:
        frequencies = _llama3(frequencies, config.rope_scaling)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1: wavelengths above original / low_freq_factor are slowed by `factor`, those below
    original / high_freq_factor stay, and between them the two are blended linearly in 1 / wavelength."""
    wavelengths = 2 * math.pi / frequencies
    share = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, slowed)
