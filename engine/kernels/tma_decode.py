"""Decode attention on Hopper: shapes and launch of `tma_decode.cu`, the faster twin of `paged_decode`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.shared import MEMBERS
from engine.attention.tables import Tables
from engine.kernels.cuda_source import Kernel, checked, compiled
from engine.kernels.paged_decode import DecodeScratch

SOURCE = Path(__file__).with_suffix(".cu")
PAGE, PAGES, WARPS = 16, 4, 4
"""Tokens of a page; pages of a stage of the ring, one for each multiplying warp."""
PER_MULTIPROCESSOR = 2
"""Programs: while one puts a row together, the other reads."""
SHARED_BYTES = 228 * 1024
"""Of a multiprocessor of Hopper, of which the driver takes RESERVED_BYTES for each program."""
RESERVED_BYTES = 1024
LONE_RING_BYTES = 64 * 1024
"""Of the ring, for a step of one row: the linears of one row read their weights ahead (`skinny_vector`), as far as
attention leaves them room on its multiprocessors."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is compiled for; see `tma_decode.cu`. lone: for steps of one row."""

    heads: int
    kv_heads: int
    dim: int
    lone: bool = False

    @property
    def head_rows(self) -> int:
        return 1 << (self.heads // self.kv_heads - 1).bit_length()

    @property
    def stage_bytes(self) -> int:
        return PAGES * PAGE * 2 * self.dim * 2

    @property
    def fixed_bytes(self) -> int:
        """Of shared memory beside the ring: what the warps put together, barriers, and room to align the ring."""
        return WARPS * self.heads // self.kv_heads * (self.dim + 6) * 4 + 256 + 1024

    @property
    def stages(self) -> int:
        room = SHARED_BYTES // PER_MULTIPROCESSOR - RESERVED_BYTES - self.fixed_bytes
        return min(room, LONE_RING_BYTES if self.lone else room) // self.stage_bytes


ARRAYS = attrgetter(*Tables.names())
"""Of tables, in the order of `Arguments`."""


class Arguments(ctypes.Structure):
    """As in `tma_decode.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in Tables.names()),
        *((name, ctypes.c_void_p) for name in ("block_ids", "q", "out", "part_out", "part_stats", "arrived")),
        *((name, ctypes.c_int) for name in ("rows", "places")),
        ("scale", ctypes.c_float),
    ]


def fits(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel is written for this and for the GPU at hand."""
    if torch.cuda.get_device_capability() != (9, 0) or dtype != torch.bfloat16:
        return False
    return dim in (64, 128) and heads // kv_heads <= 8


@cache
def kernel(shape: Shape) -> Kernel:
    """Compiled and loaded; a second call is free. Raises CudaError."""
    values = {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.dim,
        "MEMBERS": MEMBERS,
        "HEAD_ROWS": shape.head_rows,
        "STAGES": shape.stages,
        "PROGRAMS": PER_MULTIPROCESSOR,
    }
    options = tuple(f"-D{name}={value}" for name, value in values.items())
    code = compiled(SOURCE.read_text(encoding="utf-8"), options, "sm_90a")
    return Kernel.load(code, "tma_decode", (WARPS + 1) * 32, 1024 + shape.stages * shape.stage_bytes)


def prepare(heads: int, kv_heads: int, dim: int) -> None:
    """Compile and load ahead of the first call. Raises CudaError."""
    torch.cuda.synchronize()  # makes the context that kernels are loaded into
    for lone in (True, False):
        kernel(Shape(heads, kv_heads, dim, lone))


@lru_cache(maxsize=1024)
def tensor_map(pointer: int, tokens: int, kv_heads: int, dim: int) -> Any:
    """How boxes of a page's tokens, half of one head's dims each, are loaded from bf16[tokens, kv_heads, dim]."""
    from cuda.bindings import driver

    return checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            pointer,
            [driver.cuuint64_t(size) for size in (dim, kv_heads, tokens)],
            [driver.cuuint64_t(stride) for stride in (dim * 2, kv_heads * dim * 2)],
            [driver.cuuint32_t(size) for size in (64, 1, PAGE)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def paged_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tables[Tensor],
    block_ids: Tensor,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    """As `paged_decode.paged_decode`, in bf16; all of it must be contiguous. Raises CudaError.

    What is not of the rows' newest tokens is read before the launch ahead has ended: that one must write no other KV of
    theirs and no tables, and begin this one only after its own wait.
    """
    rows, heads, dim = q.shape
    blocks, _, kv_heads, _ = keys.shape
    maps = [tensor_map(pool.data_ptr(), blocks * PAGE, kv_heads, dim) for pool in (keys, values)]
    arguments = Arguments(
        *(a.data_ptr() for a in (*ARRAYS(tables), block_ids, q, out, scratch.out, scratch.stats, scratch.arrived)),
        rows,
        MEMBERS if len(tables.members) else 1,
        dim**-0.5 * 1.4426950408889634,
    )
    programs = (len(tables.streams) - 1) * kv_heads
    stream = torch.cuda.current_stream().cuda_stream
    kernel(Shape(heads, kv_heads, dim, rows == 1)).launch(programs, stream, (*maps, arguments), (None, None, None))
