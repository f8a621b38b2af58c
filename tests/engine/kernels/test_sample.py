from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.kernels import noise
from engine.kernels.sample import sample
from engine.request import SamplingParams
from engine.sampling import noise as twin
from engine.sampling.sampler import Sampler
from engine.step import NONFINITE, SlotStart


@triton.jit
def _gumbels(keys, out, QUADS: tl.constexpr):
    row = tl.program_id(0)
    drawn = noise.gumbel(noise.words(keys + row * 5, tl.arange(0, QUADS)))
    tl.store(out + row * QUADS * 4 + tl.arange(0, QUADS * 4), drawn)


def random_keys(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2**32, (rows, 5), generator=torch.Generator().manual_seed(seed))


def test_noise_has_the_twins_bits(device: torch.device) -> None:
    keys = random_keys(16, 1).to(device)
    out = torch.empty(16, 4096, device=device)
    _gumbels[(16,)](keys, out, QUADS=1024, enable_fp_fusion=False)
    assert torch.equal(out.view(torch.int32), twin.gumbel(keys, 4096).view(torch.int32))


def run(device: torch.device, logits: torch.Tensor, params: list[SamplingParams], positions: np.ndarray) -> tuple:
    rows, vocab = logits.shape
    sampler = Sampler(vocab, rows, torch.device("cpu"))
    for slot, param in enumerate(params):
        ids = np.zeros(1, np.int32)
        sampler.start(SlotStart(slot, param, ids, np.zeros(1, np.bool_), ("processed", "temperature", "raw"), 0))
    expected = sampler.sample(logits, np.arange(rows, dtype=np.int32), positions)
    key_words = [(p.seed & 0xFFFFFFFF, p.seed >> 32, p.sample_index, p.segment) for p in params]
    keys = torch.tensor([(*words, int(position)) for words, position in zip(key_words, positions, strict=True)])
    greedy = torch.tensor([p.temperature == 0 for p in params])
    temperature = torch.tensor([p.temperature or 1.0 for p in params])
    last_token = torch.full((rows + 3,), -1, device=device)
    slots = torch.arange(rows, device=device) + 2
    out = sample(logits.to(device), temperature.to(device), greedy.to(device), keys.to(device), slots, last_token).cpu()
    assert torch.equal(last_token.cpu(), torch.cat((torch.tensor([-1, -1]), out[0].long(), torch.tensor([-1]))))
    return expected, out[0], out[1], out[2:].view(torch.float32)


@pytest.mark.parametrize("vocab", [100, 2048, 5000])
def test_equals_its_twin(device: torch.device, vocab: int) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    temperatures = [0.0, 1.0, 0.5, 2.0, 1e-5, 1.0, 0.0, 0.7]
    params = [SamplingParams(temperature=t, seed=2**40 + i, sample_index=i) for i, t in enumerate(temperatures)]
    expected, ids, flags, logprobs = run(device, logits, params, np.arange(5, 13, dtype=np.int32))
    assert torch.equal(ids.long(), expected.token_ids)
    assert not flags.any()
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=0, atol=2e-6 * 40)


def test_ties_of_a_greedy_row_go_to_the_lowest_id_across_pieces(device: torch.device) -> None:
    logits = torch.zeros(1, 6000)
    logits[0, [2500, 4500]] = 2.0
    _, ids, _, logprobs = run(device, logits, [SamplingParams(temperature=0.0)], np.zeros(1, np.int32))
    assert ids.tolist() == [2500]
    assert logprobs[0, 0].item() == pytest.approx(2 - np.log(5998 + 2 * np.exp(2)), abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_flagged_and_alone(device: torch.device, bad: float) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 3000] = bad
    _, ids, flags, logprobs = run(device, logits, [SamplingParams(seed=i) for i in range(2)], np.zeros(2, np.int32))
    assert flags.tolist() == [NONFINITE, 0]
    assert ids[0].item() == 0
    assert logprobs[:, 0].isnan().all()
    assert logprobs[0, 1].item() == pytest.approx(-np.log(5000), abs=1e-5)
