"""Linears over few rows against float64, with everything that a launch holds beside the product."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels import skinny_linear
from engine.kernels.skinny_linear import MAX_ROWS, tile

EPS = 1e-6
NAN = float("nan")
ROWS = [1, 2, 8, 9, 16]
SHAPES = [(512, 64), (896, 72), (160, 130)]
"""K and N: whole tiles, and tails of both."""


@dataclass(frozen=True)
class Draw:
    """Random tensors, on the device and in its dtype; weights lie between NaNs, which must not be read."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def rows(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.device, self.dtype)

    def weight(self, n: int, k: int) -> Tensor:
        around = torch.full((3 * n * k,), NAN, dtype=self.dtype, device=self.device)
        weight = around[n * k : 2 * n * k].view(n, k)
        return weight.copy_(self.rows(n, k, scale=k**-0.5))


@pytest.fixture
def draw(device: torch.device, dtype: torch.dtype) -> Draw:
    return Draw(device, dtype, torch.Generator().manual_seed(0))


def near(found: Tensor, expected: Tensor) -> None:
    """Within the error of operands in the dtype: a rounded product of norm and gain makes it two units."""
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (6e-3 if found.dtype == torch.bfloat16 else 1e-6)


def norm64(x: Tensor, gain: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


def linear64(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_and_linear(draw: Draw, rows: int, k: int, n: int, biased: bool) -> None:
    x, gain, weight = draw.rows(rows, k, scale=3), draw.rows(k), draw.weight(n, k)
    bias = draw.rows(n) if biased else None
    expected = linear64(norm64(x, gain), weight, bias)
    near(skinny_linear.linear(skinny_linear.norm(x, gain, EPS), weight, bias), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_never_rounded_to_bf16(draw: Draw, rows: int) -> None:
    x, gain, weight = draw.rows(rows, 256), draw.rows(256), draw.weight(130, 256)
    out = torch.full((rows + 1, 130), NAN, device=draw.device)
    normed = skinny_linear.norm(x, gain, EPS)
    found = skinny_linear.linear(normed, weight, None, torch.float32, out[:rows])
    assert found.data_ptr() == out.data_ptr()
    assert out[rows].isnan().all()
    scale = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    expected = linear64(normed.x, weight, None) * scale
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gate_up(draw: Draw, rows: int, k: int, n: int, biased: bool) -> None:
    x, gain, weight = draw.rows(rows, k), draw.rows(k), draw.weight(2 * n, k)
    bias = draw.rows(2 * n) if biased else None
    gate, up = linear64(norm64(x, gain), weight, bias).chunk(2, -1)
    near(skinny_linear.gate_up(skinny_linear.norm(x, gain, EPS), weight, bias), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_linear_add_norm_and_what_follows(draw: Draw, rows: int, k: int, n: int, biased: bool) -> None:
    """The sum is in place, rounded once; the norm behind it is of the rounded sum."""
    x, weight, gain = draw.rows(rows, k), draw.weight(n, k), draw.rows(n)
    bias = draw.rows(n) if biased else None
    held = draw.rows(rows + 1, n)
    residual, plain, below = held[:rows], held[:rows].clone(), held[rows].clone()
    expected = residual.double() + linear64(x, weight, bias)
    normed = skinny_linear.linear_add_norm(x, weight, bias, residual, gain, EPS)
    near(residual, expected)
    assert torch.equal(held[rows], below)
    skinny_linear.linear_add(x, weight, bias, plain)
    assert torch.equal(plain, residual)
    second = draw.weight(40, n)
    near(skinny_linear.linear(normed, second, None), linear64(norm64(residual, gain), second, None))


@pytest.mark.parametrize("k", [512, 328])
def test_a_weight_with_less_than_a_tile_for_each_multiprocessor(draw: Draw, k: int) -> None:
    """Cut finer at up to 8 rows, with K in two sides."""
    x, gain, weight = draw.rows(8, k), draw.rows(k), draw.weight(5010, k)
    assert tile(8, len(weight)).sides == 2
    near(skinny_linear.linear(skinny_linear.norm(x, gain, EPS), weight, None), linear64(norm64(x, gain), weight, None))


@pytest.mark.parametrize("rows", ROWS)
def test_a_row_has_the_same_bits_in_every_run_and_beside_any_others(draw: Draw, rows: int) -> None:
    x, weight, gain, first = draw.rows(rows, 896), draw.weight(72, 896), draw.rows(72), draw.weight(2 * 72, 72)
    residual = draw.rows(rows, 72)
    found = []
    for others in (1.0, 1.0, NAN):
        again, sums = x.clone(), residual.clone()
        again[1:] *= others
        normed = skinny_linear.linear_add_norm(again, weight, None, sums, gain, EPS)
        found.append((sums[0], skinny_linear.gate_up(normed, first, None)[0]))
    assert found[0][1].isfinite().all()
    for sums, gated in found[1:]:
        assert torch.equal(sums, found[0][0])
        assert torch.equal(gated, found[0][1])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_rows", [512, 2560, 4096, 6144, 19456, 151936])
@pytest.mark.parametrize("rows", [1, 8, MAX_ROWS])
def test_every_tile_fits(rows: int, weight_rows: int, gated: bool) -> None:
    """In the registers of its threads (one row) or in the 227 KB of shared memory of a multiprocessor."""
    found = tile(rows, weight_rows, gated)
    if rows == 1:
        pieces = found.ahead * found.rows * found.depth * 2
        assert pieces <= found.warps * 32 * 160 * 4
    else:
        stage = found.sides * found.depth * 2 * (found.rows + rows)
        assert found.ahead * stage <= 227 * 1024
    assert found.rows % 16 == 0 or rows == 1
