"""The one place that takes device memory, and the plan of who took how much.

Everything that lives as long as the worker (arena, staging, KV pool, step buffers) is taken here at start-up, so
that what fits at start fits for ever; only the temporaries of a step come from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from engine.config import BLOCK_SIZE
from engine.errors import OutOfMemory
from engine.memory.free_memory import host_bytes
from engine.memory.kv_size import kv_bytes_per_block
from engine.memory.pinned import pinned_bytes
from engine.model.config import ModelConfig

ALIGNMENT = 256
"""Bytes; every buffer and every parameter starts at a multiple of this."""

LARGE = 64 * 2**20
"""Bytes from which on pinned memory is worth huge pages."""


@dataclass(frozen=True, slots=True)
class Allocation:
    tag: str
    nbytes: int
    device: str


P = ParamSpec("P")
T = TypeVar("T")


def within_memory(build: Callable[P, T]) -> Callable[P, T]:
    """`build` raises `OutOfMemory` for what is refused elsewhere too: temporaries of warm-up steps, graphs, arrays."""

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return build(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = str(error).partition("\n")[0]  # Python's own MemoryError says nothing
            raise OutOfMemory(reason or "no memory is left on the host", field="device") from error

    return built


class Memory:
    """Hands out flat byte buffers on one device, or on the host, and remembers them by tag."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocations: list[Allocation] = []

    def allocate(self, nbytes: int, tag: str, *, host: bool = False, pinned: bool = False) -> torch.Tensor:
        """uint8[nbytes], 256-byte aligned, contents undefined. host: on the CPU, whatever the device; pinned: so that
        copies to and from a GPU run beside the host, and at the speed of its link.

        Raises `OutOfMemory` with the plan so far when the device refuses.
        """
        device = torch.device("cpu") if host else self.device
        pinned = pinned and self.device.type == "cuda"
        try:
            if pinned and nbytes >= LARGE:
                raw = pinned_bytes(nbytes + ALIGNMENT)
            else:
                raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
        except (RuntimeError, TypeError) as error:  # the latter: a number of more than 64 bits
            taken = ", ".join(f"{item.tag} {item.nbytes / 1e6:,.1f} MB" for item in self.allocations)
            message = f"no {nbytes / 1e6:,.1f} MB of memory on {device} for {tag}, after {taken or 'nothing'}"
            raise OutOfMemory(message, field=tag) from error
        self.allocations.append(Allocation(tag, nbytes, device.type))
        if device.type == "meta":  # no addresses there
            return raw[:nbytes]
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes]

    def rest(self) -> list[Allocation]:
        """What else there is: on a GPU torch's own (graphs, temporaries) and all others', so that with what was taken
        here it adds up to the device; then what is free, of the host too."""
        rest = []
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.memory_reserved()
            taken = sum(item.nbytes for item in self.allocations if item.device == "cuda")
            rest = [
                Allocation("graphs, temporaries", reserved - taken, "cuda"),
                Allocation("driver, others", total - free - reserved, "cuda"),
                Allocation("free", free, "cuda"),
            ]
        return [*rest, Allocation("free", host_bytes(), "cpu")]


class KVPool:
    """K and V of every layer in blocks of 16 tokens: [blocks, 16, kv_heads, head_dim] each. Block 0 is the dummy."""

    def __init__(self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, memory: Memory) -> None:
        if num_blocks < 2:
            raise OutOfMemory(
                f"a KV pool of {num_blocks} blocks is too small: block 0 is the dummy", field="num_blocks"
            )
        flat = memory.allocate(num_blocks * kv_bytes_per_block(config, dtype.itemsize), "kv pool").view(dtype)
        shape = (config.num_layers, 2, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.data = flat.view(shape)
        self.keys = tuple(layer[0] for layer in self.data)
        self.values = tuple(layer[1] for layer in self.data)
