"""What Hopper's decode attention is compiled for, and what it is given: none of it needs a GPU."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest
import torch

from engine.attention.split import STEP
from engine.config import BLOCK_SIZE
from engine.kernels import tma_decode
from engine.kernels.paged_decode import TOKENS
from engine.kernels.tma_decode import (
    PAGE,
    PAGES,
    PER_MULTIPROCESSOR,
    RESERVED_BYTES,
    SHARED_BYTES,
    SOURCE,
    WARPS,
    Arguments,
    Shape,
)

MODELS = {
    "qwen3-0.6b": Shape(16, 8, 128),
    "qwen3-4b and 8b, llama-8b": Shape(32, 8, 128),
    "qwen3-14b": Shape(40, 8, 128),
    "qwen3-32b, llama-70b": Shape(64, 8, 128),
    "qwen2.5-7b": Shape(28, 4, 128),
    "qwen2.5-0.5b": Shape(14, 2, 64),
    "llama-1b": Shape(32, 8, 64),
}


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_programs_share_a_multiprocessor_and_read_ahead(shape: Shape) -> None:
    ring = shape.stages * shape.stage_bytes
    assert (ring + shape.fixed_bytes + RESERVED_BYTES) * PER_MULTIPROCESSOR <= SHARED_BYTES
    assert shape.stages >= 2
    assert PER_MULTIPROCESSOR * ring >= 128 * 1024


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_a_lone_row_leaves_room_for_the_linear_behind_it(shape: Shape) -> None:
    lone = replace(shape, lone=True)
    assert 2 <= lone.stages <= shape.stages
    used = (lone.stages * lone.stage_bytes + lone.fixed_bytes + RESERVED_BYTES) * PER_MULTIPROCESSOR
    assert SHARED_BYTES - used >= SHARED_BYTES // 4


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dim", [64, 128])
def test_what_warps_put_together_has_its_room(group: int, dim: int) -> None:
    """Sums of WARPS warps with their four spare floats, and two numbers a head; then barriers, and the ring's start."""
    shape = Shape(8 * group, 8, dim)
    assert shape.stages >= 2
    assert shape.stage_bytes == PAGES * 2 * PAGE * dim * 2
    shared = WARPS * group * ((dim + 4) + 2) * 4 + 2 * shape.stages * 8 + 16
    assert shared + 1024 <= shape.fixed_bytes


def test_sizes_that_are_written_twice_are_the_same() -> None:
    assert f"WARPS = {WARPS}, PAGES = WARPS, STAGE_BYTES = PAGES * 2 * PAGE_BYTES" in SOURCE.read_text()
    assert f"PAGE = {PAGE}, " in SOURCE.with_name("attention.cuh").read_text()
    assert PAGES == WARPS
    assert PAGE == BLOCK_SIZE
    assert PAGES * PAGE == TOKENS == STEP  # read at a time by either kernel, and by whoever cuts rows for them


@pytest.mark.parametrize(("heads", "rows"), [(8, 1), (16, 2), (24, 4), (32, 4), (40, 8), (56, 8), (64, 8)])
def test_query_heads_of_a_kv_head_are_padded_to_a_power_of_two(heads: int, rows: int) -> None:
    assert Shape(heads, 8, 128).head_rows == rows


def test_arguments_lie_as_the_kernel_reads_them() -> None:
    (body,) = re.findall(r"struct Arguments \{(.*?)\};", SOURCE.read_text(), re.DOTALL)
    declared = [
        (name.strip().lstrip("*"), "*" in name or "*" in kind)
        for kind, names in re.findall(r"(const int\*?|const u32\*|unsigned short\*|float2?\*?|int\*?) ([^;]+);", body)
        for name in names.split(",")
    ]
    assert [name for name, _ in declared] == [name for name, _ in Arguments._fields_]
    assert [pointer for _, pointer in declared] == [kind is ctypes.c_void_p for _, kind in Arguments._fields_]


@pytest.mark.parametrize(
    ("capability", "heads", "dim", "dtype", "fits"),
    [
        ((9, 0), 32, 128, torch.bfloat16, True),
        ((9, 0), 64, 64, torch.bfloat16, True),
        ((8, 0), 32, 128, torch.bfloat16, False),
        ((10, 0), 32, 128, torch.bfloat16, False),
        ((9, 0), 32, 128, torch.float16, False),
        ((9, 0), 32, 80, torch.bfloat16, False),
        ((9, 0), 32, 256, torch.bfloat16, False),
        ((9, 0), 128, 128, torch.bfloat16, False),
    ],
)
def test_what_it_is_not_written_for_is_left_to_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    fits: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert tma_decode.fits(heads, 8, dim, dtype) is fits
