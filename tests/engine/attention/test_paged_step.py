from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import paged_step
from engine.attention.paged_step import DecodeStep, MixedStep, choose_decode_kernel
from engine.attention.shared import no_runs
from engine.attention.tables import Tables, lay_out
from engine.cuda.input import CudaInput
from engine.kernels import tma_decode
from engine.kernels.paged_decode import DecodeScratch
from engine.memory.memory import Memory
from tests.engine.plans import CPU

ROWS, STREAMS = 40, 33
NOTHING: Any = None


@pytest.fixture
def fixed() -> dict[str, Tensor]:
    return CudaInput(ROWS, 64, ROWS * 4, STREAMS, 2, Memory(CPU)).fixed


class Twice:
    """In the place of a kernel."""

    def __init__(self) -> None:
        self.given: list[object] = []

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tables[Tensor],
        block_ids: Tensor,
        scratch: DecodeScratch,
        out: Tensor,
    ) -> None:
        self.given = [keys, values, tables, block_ids, scratch]
        out.copy_(2 * q)


class Thrice:
    """In the place of FlashInfer's wrapper."""

    def __init__(self) -> None:
        self.given: tuple[object, ...] = ()

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, out: Tensor) -> None:
        self.given = kv
        out.copy_(3 * q)


@pytest.mark.parametrize("fits", [False, True])
def test_the_faster_kernel_is_taken_and_compiled_where_it_fits(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    asked: list[tuple[object, ...]] = []
    prepared: list[tuple[int, ...]] = []
    monkeypatch.setattr(tma_decode, "fits", lambda *shape: asked.append(shape) or fits)
    monkeypatch.setattr(tma_decode, "prepare", lambda *shape: prepared.append(shape))
    kernel = choose_decode_kernel(32, 8, 128, torch.bfloat16)
    assert kernel is (tma_decode.paged_decode if fits else paged_step.paged_decode)
    assert asked == [(32, 8, 128, torch.bfloat16)]
    assert prepared == [(32, 8, 128)] * fits


@pytest.mark.parametrize("rows", [1, 15, 16, 33, ROWS])
def test_a_step_of_any_number_of_rows_has_the_tables_that_are_laid_out_for_it(
    fixed: dict[str, Tensor], rows: int
) -> None:
    tables = DecodeStep.of(fixed, rows, NOTHING, NOTHING).tables
    laid = lay_out(np.full(rows, 100, np.int32), no_runs(rows), rows, STREAMS).tables
    for name in ("tile_owners", "tile_blocks", "tile_tokens", "streams", "seats"):
        assert len(getattr(tables, name)) == len(getattr(laid, name))
    assert len(tables.first_tiles) == len(tables.tile_counts) == rows + len(tables.members) // paged_step.MEMBERS
    assert bool(len(tables.members)) is (rows >= 16)


@pytest.mark.parametrize("decodes", [0, 2, 5])
def test_decode_rows_come_first_and_prompts_behind_them(fixed: dict[str, Tensor], decodes: int) -> None:
    q = torch.arange(5 * 4 * 2, dtype=torch.float32).view(5, 4, 2)
    keys, values, kernel, wrapper = torch.zeros(1), torch.ones(1), Twice(), Thrice()
    decode = DecodeStep.of(fixed, decodes, kernel, NOTHING) if decodes else None
    out = MixedStep(decode, wrapper if decodes < 5 else None).attend(q, keys, values)
    assert torch.equal(out, torch.cat((2 * q[:decodes], 3 * q[decodes:])).flatten(1))
    assert wrapper.given == ((keys, values) if decodes < 5 else ())
    if decode is not None:
        assert kernel.given == [keys, values, decode.tables, decode.block_ids, decode.scratch]
        assert torch.equal(decode.attend(q, keys, values), 2 * q.flatten(1))
