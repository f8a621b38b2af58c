"""How much memory the KV cache takes: arithmetic alone, for those who plan without a device."""

from __future__ import annotations

from engine.config import BLOCK_SIZE
from engine.errors import OutOfMemory
from engine.model.config import ModelConfig


def kv_bytes_per_block(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one block of `BLOCK_SIZE` tokens: K and V of every layer."""
    return 2 * config.num_layers * BLOCK_SIZE * config.num_kv_heads * config.head_dim * itemsize


def kv_blocks_in(budget: int, config: ModelConfig, itemsize: int) -> int:
    """How many blocks fit in `budget` bytes, the dummy block included. At least 2, else `OutOfMemory`."""
    blocks = budget // kv_bytes_per_block(config, itemsize)
    if blocks < 2:
        raise OutOfMemory(
            f"a KV pool of {budget:,} bytes holds {blocks} blocks of {kv_bytes_per_block(config, itemsize):,} bytes; "
            "at least 2 are needed",
            field="kv_bytes",
        )
    return blocks
