"""Kernels run on the GPU where there is one, else in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """The dtype of a kernel's data. Triton's interpreter truncates where a GPU rounds to bf16, and multiplies the bits
    of bf16 operands as integers; there the kernels are tested in float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture
def close(dtype: torch.dtype) -> dict[str, float]:
    """Tolerances of one unit in the last place of the dtype, or a few of float32."""
    return {"rtol": 2**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
