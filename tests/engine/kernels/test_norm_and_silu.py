from __future__ import annotations

import pytest
import torch

from engine.kernels.norm import add_rms_norm, rms_norm
from engine.kernels.silu_mul import silu_mul
from engine.model.ops import TorchOps


def draw(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (torch.randn(rows, columns, generator=generator) * 3).to(device, dtype)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 2560), (5, 64), (3, 576), (2, 4096)])
def test_norms_equal_their_twins(
    device: torch.device, dtype: torch.dtype, close: dict[str, float], rows: int, hidden: int
) -> None:
    x, weight = draw(rows, hidden, device, dtype), draw(1, hidden, device, dtype)[0]
    residual = x.flip(0).contiguous()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), TorchOps().norm(x, weight, 1e-6), **close)
    expected_sum = residual + x
    expected = TorchOps().norm(expected_sum, weight, 1e-6)
    torch.testing.assert_close(add_rms_norm(x, residual, weight, 1e-6), expected, **close)
    torch.testing.assert_close(residual, expected_sum, **close)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_added_may_come_in_parts(
    device: torch.device, dtype: torch.dtype, close: dict[str, float], parts: int
) -> None:
    pieces = torch.stack([draw(5, 640, device, torch.float32).roll(part, 0) for part in range(parts)])
    residual, weight = draw(5, 640, device, dtype), draw(1, 640, device, dtype)[0]
    expected_sum = (residual.float() + pieces.sum(0)).to(dtype)
    found = add_rms_norm(pieces, residual, weight, 1e-6)
    torch.testing.assert_close(residual, expected_sum, **close)
    torch.testing.assert_close(found, TorchOps().norm(expected_sum, weight, 1e-6), **close)


@pytest.mark.parametrize(("rows", "inner"), [(1, 9728), (7, 96), (2, 1025)])
def test_silu_mul_equals_its_twin(
    device: torch.device, dtype: torch.dtype, close: dict[str, float], rows: int, inner: int
) -> None:
    gate_up = draw(rows, 2 * inner, device, dtype)
    expected = TorchOps().silu_mul(gate_up)
    torch.testing.assert_close(silu_mul(gate_up), expected, **close)
