"""The gated linear of many rows against the same in double precision; what is not written shows as NaN."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine.kernels import gate_up
from engine.kernels.silu_mul import silu_mul

SHAPES = {"4b": (2560, 9728), "8b": (4096, 12288), "0.6b": (1024, 3072), "llama-8b": (4096, 14336), "odd": (264, 520)}
"""hidden, inner. The kernel walks over hidden in pieces of 64 and cuts inner into as many parts as multiprocessors."""


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not gate_up.fits(8, 8):
        pytest.skip("written for compute capability 9.0")


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def poison(bytes_: int) -> None:
    """What the next allocation finds."""
    torch.full((bytes_ // 4,), float("nan"), device="cuda")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 128, 150, 192, 193, 255, 256])
def test_it_is_nearer_to_the_exact_one_than_cublas_with_a_gate_behind_it(shape: str, rows: int) -> None:
    hidden, inner = SHAPES[shape]
    x, weight = drawn(rows, hidden), drawn(2 * inner, hidden, scale=hidden**-0.5)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    exact = functional.silu(gate) * up
    poison(rows * inner * 2)
    found = gate_up.gate_up(x, weight)
    apart = silu_mul(functional.linear(x, weight))
    error = [float((h.double() - exact).norm() / exact.norm()) for h in (found, apart)]
    assert error[0] < error[1]
    worst = [float((h.double() - exact).abs().max()) for h in (found, apart)]
    assert worst[0] <= worst[1]


def test_the_same_rows_give_the_same_bits_beside_any_others_of_as_many_tiles() -> None:
    x, weight = drawn(192, 2560), drawn(2 * 9728, 2560, scale=0.02)
    whole = gate_up.gate_up(x, weight)
    assert torch.equal(gate_up.gate_up(x[:130], weight), whole[:130])
    assert torch.equal(gate_up.gate_up(x[64:], weight), whole[64:])
    assert torch.equal(gate_up.gate_up(x[100:101], weight), whole[100:101])


def test_large_gates_close_or_open_and_are_never_nan() -> None:
    x = torch.ones(32, 64, dtype=torch.bfloat16, device="cuda")
    gates = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0, 1e30, -1e30, 8.0], device="cuda").repeat_interleave(8)
    weight = torch.zeros(128, 64, dtype=torch.bfloat16, device="cuda")
    weight[:64, 0] = gates.bfloat16()
    weight[64:, 0] = 2.0
    found = gate_up.gate_up(x, weight).float()
    gate = weight[:64, 0].float()
    torch.testing.assert_close(found, (functional.silu(gate) * 2.0).expand(32, 64), rtol=2**-7, atol=1e-6)
    assert not found.isnan().any()


def test_a_launch_waits_for_what_writes_its_rows_and_is_waited_for() -> None:
    """It may begin before the launch ahead has ended: a chain of them, each the next one's input, a thousand times."""
    weight = drawn(2 * 2560, 2560, scale=0.03)
    x = drawn(64, 2560)
    expected = x
    for _ in range(4):
        expected = gate_up.gate_up(expected, weight)
        torch.cuda.synchronize()
    for _ in range(250):
        found = x
        for _ in range(4):
            found = gate_up.gate_up(found, weight)
        assert torch.equal(found, expected)


def test_every_number_of_rows_has_its_kernel_before_the_first_call() -> None:
    gate_up.prepare(3072)
    loaded = gate_up.kernel.cache_info().misses
    weight = drawn(2 * 3072, 1024)
    for rows in range(1, gate_up.MAX_ROWS + 1, 15):
        gate_up.gate_up(drawn(rows, 1024), weight)
    assert gate_up.kernel.cache_info().misses == loaded
