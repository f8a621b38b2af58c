"""The gated linear of an MLP over 17 to 256 rows, on Hopper: shapes and launch of `gate_up.cu`.

Twin: `TorchOps.gate_up`, from which it differs in that gate and up are not rounded before they meet.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.kernels.cuda_source import Kernel, checked, compiled

SOURCE = Path(__file__).with_suffix(".cu")
DEPTH = 64
"""Columns of x and of the weight a program has in one piece."""
SHARED_BYTES = 227 * 1024 - 1024
"""Of a multiprocessor of Hopper, for one program's ring; the rest aligns it."""
WIDEST = 192
"""Rows of the weight for a program of 256 rows of x: its sums fill the registers."""
MAX_ROWS = 256
"""With more, cuBLAS is as fast, with the gate in a launch of its own (Qwen3-4B on an H200)."""
MOST_STAGES = {1: 4, 2: 8, 3: 8, 4: 8}
"""By tiles. Four of Qwen3-4B leave half of the shared memory to the next launch's programs: 1 us a layer at 64 rows."""
ARGUMENTS = (None, None, None, ctypes.c_int, ctypes.c_int, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernel is compiled for; see `gate_up.cu`."""

    tiles: int
    groups: int
    width: int
    stages: int

    @property
    def stage_bytes(self) -> int:
        """A piece of x and one of the weight, and two barriers."""
        return (self.tiles * 64 + self.width) * DEPTH * 2 + 16


def fits(inner: int, depth: int) -> bool:
    """Whether the GPU at hand has what the kernel is written for, and rows of the weight and of h can be loaded and
    stored in boxes: whole 16 bytes."""
    return torch.cuda.get_device_capability() == (9, 0) and inner % 8 == 0 and depth % 8 == 0


def choose(rows: int, inner: int, programs: int) -> Shape:
    """Of `programs` at a time, one a multiprocessor, each has all rows; there are two turns of them and more where one
    would be too wide."""
    tiles = -(-rows // 64)
    turns = -(-inner // (programs * WIDEST // 2))
    width = 2 * -(-inner // (programs * turns * 8)) * 8
    shape = Shape(tiles, {1: 1, 2: 2, 3: 3, 4: 2}[tiles], width, 1)
    return replace(shape, stages=min(MOST_STAGES[tiles], SHARED_BYTES // shape.stage_bytes))


def prepare(inner: int) -> None:
    """Compile for every number of rows there can be, side by side, and load. Raises CudaError."""
    torch.cuda.synchronize()  # makes the context that kernels are loaded into
    shapes = [choose(rows, inner, multiprocessors()) for rows in range(64, MAX_ROWS + 1, 64)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(code, shapes))
    for shape in shapes:
        kernel(shape)


@cache
def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count)


@cache
def code(shape: Shape) -> bytes:
    return compiled(source(shape.width), options(shape), "sm_90a")


@cache
def kernel(shape: Shape) -> Kernel:
    """Loaded; a second call is free."""
    shared = 1024 + shape.stages * shape.stage_bytes
    return Kernel.load(code(shape), "gate_up", (shape.groups + 1) * 128, shared)


def options(shape: Shape) -> tuple[str, ...]:
    names = {"TILES": shape.tiles, "GROUPS": shape.groups, "WIDTH": shape.width, "STAGES": shape.stages}
    return tuple(f"-D{name}={value}" for name, value in names.items())


def source(width: int) -> str:
    """The kernel with the instruction for a product of 64 by `width`: it names every register of its sums."""
    count = width // 2
    sums = ", ".join(f"%{place}" for place in range(count))
    outputs = ", ".join(f'"+f"(sums[{place}])' for place in range(count))
    multiply = f"""void multiply(float (&sums)[{count}], u64 x, u64 weight) {{
    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, 1, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{sums}}}, "
                 "%{count}, %{count + 1}, add, 1, 1, 0, 0;\\n}}"
                 : {outputs}
                 : "l"(x), "l"(weight));
}}"""
    return SOURCE.read_text(encoding="utf-8").replace("/*MULTIPLY*/", multiply)


def tensor_map(matrix: Tensor, rows: int, columns: int, swizzled: bool = True) -> Any:
    """How boxes of bf16 `matrix` [R, C] are loaded and stored; what lies outside of it is 0, and not stored."""
    from cuda.bindings import driver

    swizzle = driver.CUtensorMapSwizzle
    return checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(matrix.shape[1]), driver.cuuint64_t(matrix.shape[0])],
            [driver.cuuint64_t(matrix.stride(0) * 2)],
            [driver.cuuint32_t(columns), driver.cuuint32_t(rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of [gate, up] = x @ weight.T for up to MAX_ROWS rows. x: bf16[T, K], weight: bf16[2 * inner, K]
    -> bf16[T, inner]."""
    rows, inner = len(x), len(weight) // 2
    shape = choose(rows, inner, multiprocessors())
    h = x.new_empty(rows, inner)
    values = (
        tensor_map(x, rows, DEPTH),
        tensor_map(weight, shape.width // 2, DEPTH),
        tensor_map(h, 64, shape.width // 2, swizzled=False),
        rows,
        inner,
        x.shape[1],
    )
    programs = -(-inner // (shape.width // 2))
    kernel(shape).launch(programs, torch.cuda.current_stream().cuda_stream, values, ARGUMENTS)
    return h
