from __future__ import annotations

import pytest
import torch

from engine.errors import OutOfMemory
from engine.memory.kv_size import kv_blocks_in, kv_bytes_per_block
from engine.memory.memory import Allocation, KVPool, Memory
from engine.model.config import parse_model_config
from tests.rigs import RandModel

CPU = torch.device("cpu")
CONFIG = parse_model_config(RandModel(layers=3, heads=4, kv_heads=2, head_dim=32).config())
BLOCK = 2 * 3 * 16 * 2 * 32


def test_buffers_are_aligned_and_of_the_size_asked_for() -> None:
    memory = Memory(CPU)
    for nbytes in (1, 255, 256, 4097):
        buffer = memory.allocate(nbytes, "x")
        assert (buffer.dtype, buffer.shape) == (torch.uint8, (nbytes,))
        assert buffer.data_ptr() % 256 == 0


def test_the_plan_names_who_took_what() -> None:
    memory = Memory(torch.device("meta"))
    memory.allocate(2_000_000, "weights")
    memory.allocate(3_000_000, "kv pool")
    memory.allocate(500_000, "staging", host=True)
    assert memory.allocations == [
        Allocation("weights", 2_000_000, "meta"),
        Allocation("kv pool", 3_000_000, "meta"),
        Allocation("staging", 500_000, "cpu"),
    ]


def test_what_does_not_fit_is_refused_with_the_plan_so_far() -> None:
    memory = Memory(CPU)
    memory.allocate(1000, "weights")
    with pytest.raises(OutOfMemory, match="weights") as caught:
        memory.allocate(1 << 60, "kv pool")
    assert caught.value.field == "kv pool"
    assert [item.tag for item in memory.allocations] == ["weights"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pool_is_blocks_of_sixteen_for_each_layer(dtype: torch.dtype) -> None:
    memory = Memory(CPU)
    pool = KVPool(CONFIG, 5, dtype, memory)
    assert kv_bytes_per_block(CONFIG, dtype.itemsize) == BLOCK * dtype.itemsize
    assert memory.allocations[0].nbytes == pool.data.nbytes == 5 * BLOCK * dtype.itemsize
    assert len(pool.keys) == len(pool.values) == 3
    for view in (*pool.keys, *pool.values):
        assert view.shape == (5, 16, 2, 32)
        assert view.is_contiguous()
        view.fill_(1.0)
    assert pool.data.float().mean() == 1.0
    pool.keys[1].fill_(2.0)
    assert pool.data.float().sum() == pool.data.numel() + pool.keys[1].numel(), "views overlap"


def test_blocks_in_a_budget() -> None:
    size = BLOCK * 4
    assert kv_blocks_in(2 * size, CONFIG, 4) == 2
    assert kv_blocks_in(10 * size - 1, CONFIG, 4) == 9
    for budget in (2 * size - 1, 0):
        with pytest.raises(OutOfMemory):
            kv_blocks_in(budget, CONFIG, 4)
    with pytest.raises(OutOfMemory):
        KVPool(CONFIG, 1, torch.float32, Memory(CPU))
