"""Which tiles a model's gate and up are cut into: what every kernel of them needs of a multiprocessor."""

from __future__ import annotations

import pytest

from engine.kernels.gate_up import MAX_ROWS, SHARED_BYTES, choose, options, source

INNER = {
    "0.6b": 3072,
    "4b": 9728,
    "8b": 12288,
    "llama-8b": 14336,
    "14b": 17408,
    "7b": 18944,
    "32b": 25600,
    "70b": 28672,
}


@pytest.mark.parametrize("programs", [16, 60, 78, 114, 132])
@pytest.mark.parametrize("inner", [8, 520, *INNER.values()])
def test_every_shape_fits_a_multiprocessor(inner: int, programs: int) -> None:
    for rows in range(1, MAX_ROWS + 1):
        shape = choose(rows, inner, programs)
        assert 64 * (shape.tiles - 1) < rows <= 64 * shape.tiles
        assert shape.tiles % shape.groups == 0
        assert shape.width % 16 == 0  # halves of whole eights
        assert shape.width <= 192
        assert shape.stages >= 2
        assert shape.stages * shape.stage_bytes <= SHARED_BYTES
        # h leaves through the ring.
        assert shape.tiles * 64 * shape.width <= shape.stages * (shape.stage_bytes - 16)
        columns = shape.width // 2
        assert -(-inner // columns) * columns < inner + columns


def test_a_width_that_is_measured_gives_every_multiprocessor_one_program() -> None:
    assert [choose(64, INNER[name], 132).width for name in ("0.6b", "4b", "8b")] == [48, 160, 192]
    assert -(-INNER["4b"] // 80) == 122
    assert choose(64, INNER["4b"], 132).stages == 4
    assert [choose(rows, INNER["4b"], 132).stages for rows in (128, 192, 256)] == [6, 5, 4]


def test_the_source_names_every_register_of_a_product() -> None:
    text = source(48)
    assert "m64n48k16" in text
    assert '"+f"(sums[23])' in text
    assert "sums[24])" not in text
    assert "%25, add" in text
    assert "/*MULTIPLY*/" not in text
    assert "-DWIDTH=48" in options(choose(64, INNER["0.6b"], 132))
