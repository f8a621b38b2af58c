"""Each op against a plain float64 account of it."""

from __future__ import annotations

import pytest
import torch

from engine.model import ops as ops_module
from engine.model.config import parse_model_config
from engine.model.ops import TorchOps
from engine.model.rope import rope_table
from tests.rigs import RandModel

OPS = TorchOps()
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within float32's error; for bf16 one rounding more, not two."""
    assert found.dtype == dtype
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 2e-6}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-6)


def norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm(dtype: torch.dtype, scale: float) -> None:
    x, weight = rand(5, 64, dtype=dtype) * scale, rand(64, dtype=dtype, seed=1)
    before = x.clone()
    close(OPS.norm(x, weight, EPS), norm64(x, weight), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_add_norm_adds_in_place(dtype: torch.dtype, biased: bool) -> None:
    x, weight, residual = rand(3, 16, dtype=dtype), rand(64, 16, dtype=dtype, seed=1), rand(3, 64, dtype=dtype, seed=2)
    norm, bias = rand(64, dtype=dtype, seed=3), rand(64, dtype=dtype, seed=4) if biased else None
    total, plain = residual + OPS.linear(x, weight, bias), residual.clone()
    address = residual.data_ptr()
    found = OPS.linear_add_norm(x, weight, bias, residual, norm, EPS)
    assert torch.equal(residual, total)
    assert residual.data_ptr() == address
    close(found, norm64(total, norm), dtype)
    OPS.linear_add(x, weight, bias, plain)
    assert torch.equal(plain, total)


def test_an_embedding_row_is_not_the_weight_itself() -> None:
    weight = rand(7, 4)
    found = OPS.embedding(torch.tensor([3, 3, 0]), weight)
    assert torch.equal(found, weight[[3, 3, 0]])
    found.zero_()
    assert not weight[3].eq(0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = rand(3, 20, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(OPS.silu_mul(gate_up), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("biased", [True, False])
def test_gate_up(biased: bool) -> None:
    x, weight, bias = rand(3, 8), rand(20, 8, seed=1), rand(20, seed=2) if biased else None
    gate, up = (x.double() @ weight.double().T + (0 if bias is None else bias)).chunk(2, -1)
    found = OPS.gate_up(x, weight, bias)
    torch.testing.assert_close(found.double(), gate * torch.sigmoid(gate) * up, rtol=1e-5, atol=1e-5)


def test_linear() -> None:
    x, weight, bias = rand(3, 8), rand(5, 8, seed=1), rand(5, seed=2)
    plain = x.double() @ weight.double().T
    close(OPS.linear(x, weight, None), plain, torch.float32)
    close(OPS.linear(x, weight, bias), plain + bias, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [3, ops_module.HEAD_SLICE, 2 * ops_module.HEAD_SLICE + 5])
def test_the_head_is_fp32_whatever_the_weights_are(dtype: torch.dtype, vocab: int) -> None:
    x, weight = rand(2, 16, dtype=dtype), rand(vocab, 16, dtype=dtype, seed=1)
    found = OPS.head_fp32(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


def turned64(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + dim / 2]) by angles[i]. x: [heads, dim]."""
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_write(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 8, 4
    config = parse_model_config(RandModel(heads=heads, kv_heads=kv_heads, head_dim=dim, rope_theta=100.0).config())
    positions = torch.tensor([0, 5, 17, 60])
    write_slots = torch.tensor([16, 47, 20, 33])
    qkv = rand(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = rand(2, dim, dtype=dtype, seed=1) if normed else None
    keys, values = torch.full((2, 4, 16, kv_heads, dim), float("nan"), dtype=dtype)
    rope = rope_table(config, 64, torch.device("cpu"))[positions]
    q = OPS.qk_norm_rope_write(qkv, weights, EPS, rope, write_slots, keys, values)

    assert q.shape == (tokens, heads, dim)
    split = qkv.view(tokens, -1, dim)
    frequencies = 100.0 ** (-torch.arange(0, dim, 2) / dim)
    for token in range(tokens):
        raw_q, raw_k, raw_v = split[token].split((heads, kv_heads, kv_heads))
        if weights is not None:
            raw_q, raw_k = norm64(raw_q, weights[0]), norm64(raw_k, weights[1])
        angles = positions[token] * frequencies
        slot = int(write_slots[token])
        close(q[token], turned64(raw_q, angles), dtype)
        close(keys[slot // 16, slot % 16], turned64(raw_k, angles), dtype)
        assert torch.equal(values[slot // 16, slot % 16], raw_v)
    for cache in (keys, values):
        written = ~cache.isnan().all(-1).all(-1).view(-1)
        assert written.nonzero()[:, 0].tolist() == sorted(write_slots.tolist())
