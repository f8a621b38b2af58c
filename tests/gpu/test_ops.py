"""The GPU's functions of the decoder against their twins, where no kernel of ours has a test of its own."""

from __future__ import annotations

import pytest
import torch

from bench.make_model import SHAPES
from engine.cuda.ops import HALVED_ROWS, CudaOps
from engine.model.config import parse_model_config
from engine.model.ops import TorchOps

QWEN3_4B = parse_model_config(SHAPES["qwen3-4b"])


@pytest.mark.parametrize("rows", [33, 128, HALVED_ROWS, HALVED_ROWS + 1])
@pytest.mark.parametrize("width", [4096, 9728])
def test_a_linear_back_to_hidden_equals_its_twin(rows: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, width, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(2560, width, generator=generator, device="cuda") / width**0.5).bfloat16()
    residual = torch.randn(rows, 2560, generator=generator, device="cuda").bfloat16()
    gain = torch.rand(2560, generator=generator, device="cuda").bfloat16()
    exact = residual.double()
    expected = TorchOps().linear_add_norm(x.double(), weight.double(), None, exact, gain.double(), 1e-6)
    found = CudaOps(QWEN3_4B).linear_add_norm(x, weight, None, residual, gain, 1e-6)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(residual.double(), exact, rtol=2**-8, atol=2e-2)
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2e-2)
