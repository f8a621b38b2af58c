from __future__ import annotations

import pytest
import torch

from engine.kernels.qk_norm_rope_write import qk_norm_rope_write
from engine.model.ops import TorchOps

BLOCKS = 5


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (4, 2, 32), (14, 2, 64), (8, 8, 128)])
def test_equals_its_twin(
    device: torch.device,
    dtype: torch.dtype,
    close: dict[str, float],
    heads: int,
    kv_heads: int,
    dim: int,
    norm: bool,
    tokens: int,
) -> None:
    generator = torch.Generator().manual_seed(heads * dim)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv = draw(tokens, (heads + 2 * kv_heads) * dim)
    weights = draw(2, dim) if norm else None
    angles = draw(tokens, dim // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    rope = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).contiguous()
    slots = torch.randperm((BLOCKS - 1) * 16, generator=generator)[:tokens].to(device) + 16
    caches = [torch.full((BLOCKS, 16, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(4)]

    q = qk_norm_rope_write(qkv, weights, 1e-6, rope, slots, caches[0], caches[1])
    expected = TorchOps().qk_norm_rope_write(qkv.clone(), weights, 1e-6, rope, slots, caches[2], caches[3])

    torch.testing.assert_close(q.float(), expected.float(), **close, equal_nan=True)
    torch.testing.assert_close(caches[0].float(), caches[2].float(), **close, equal_nan=True)
    assert torch.equal(caches[1].nan_to_num(), caches[3].nan_to_num())
    untouched = torch.ones(BLOCKS * 16, dtype=torch.bool, device=device)
    untouched[slots] = False
    assert caches[0].view(BLOCKS * 16, -1)[untouched].isnan().all()
