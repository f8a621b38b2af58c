"""Every law of the sampler as kernels draw it, against the twin: ids, logprobs, flags, counts, alternatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda.input import CudaInput
from engine.cuda.sampler import CudaSampler
from engine.memory.memory import Memory
from engine.request import SamplingParams
from engine.sampling.sampler import Sampler
from engine.step import EMPTY_SUPPORT, NONFINITE, SlotStart
from tests.engine.plans import Row, plan
from tests.engine.sampling.laws import EVERY, LAWS, MODES, PROMPT, SAMPLED, VOCAB, logits_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITION = len(PROMPT)


class Pair:
    """The same slots in both samplers. Draws of one step, by kernels and by the twin."""

    def __init__(self, laws: list[SamplingParams], vocab: int = VOCAB, *, modes: Any = MODES, top: int = 0) -> None:
        self.twin = Sampler(vocab, len(laws), torch.device("cpu"))
        self.ours = CudaSampler(vocab, len(laws), DEVICE)
        for slot, params in enumerate(laws):
            for sampler in (self.twin, self.ours):
                sampler.start(SlotStart(slot, params, PROMPT, SAMPLED, modes, top if slot % 2 else 0))
        self.input = CudaInput(len(laws), 64, 4 * len(laws), 1, 1, Memory(DEVICE))
        self.last = torch.full((len(laws) + 1,), -1, dtype=torch.int64, device=DEVICE)

    def draw(self, logits: torch.Tensor, slots: list[int], position: int = POSITION) -> Any:
        """(ids, flags, logprobs) of both, and the alternatives of both."""
        at, where = np.array(slots, np.int32), np.full(len(slots), position, np.int32)
        law = self.ours.law(at, where)
        self.input.pack_decode(0, plan(*(Row(slot, position - 1, [1]) for slot in slots)), law, len(slots))
        there = logits.to(DEVICE)
        top = self.ours.alternatives(there, at) if law.alternatives else (None, None)
        out = self.ours.draw(there, at, law, self.input.fixed, self.last).cpu()
        wanted = self.twin.sample(logits, at, where)
        assert torch.equal(self.last[torch.tensor(slots, device=DEVICE)].cpu(), out[0].long())
        ours = out[0].long(), out[1].to(torch.uint8), out[2:].view(torch.float32)
        return ours, (wanted.token_ids, wanted.flags, wanted.logprobs), top, (wanted.top_ids, wanted.top_logprobs)


def check(ours: Any, wanted: Any) -> None:
    assert torch.equal(ours[0], wanted[0])
    assert torch.equal(ours[1], wanted[1])
    torch.testing.assert_close(ours[2], wanted[2], rtol=0, atol=2e-5, equal_nan=True)


def test_every_law_in_one_batch_over_several_steps() -> None:
    """Penalties see what the steps before drew."""
    pair = Pair(list(EVERY.values()))
    for step in range(3):
        ours, wanted, _, _ = pair.draw(logits_of(len(EVERY), seed=step), list(range(len(EVERY))), POSITION + step)
        check(ours, wanted)


@pytest.fixture(scope="module")
def among() -> Any:
    """Every law drawn in one batch."""
    return Pair(list(EVERY.values())).draw(logits_of(len(EVERY)), list(range(len(EVERY))))[0]


@pytest.mark.parametrize("name", EVERY)
def test_a_law_alone_draws_what_it_draws_among_others(among: Any, name: str) -> None:
    slot = list(EVERY).index(name)
    logits = logits_of(len(EVERY))
    alone, wanted, _, _ = Pair(list(EVERY.values())).draw(logits[slot : slot + 1].clone(), [slot])
    check(alone, wanted)
    assert alone[0][0] == among[0][slot]
    assert torch.equal(alone[2][:, 0], among[2][:, slot])


@pytest.mark.parametrize("vocab", [100, 2500])
def test_filters_over_pieces_of_the_vocabulary(vocab: int) -> None:
    laws = [
        SamplingParams(temperature=0.6, top_p=0.95, top_k=20, seed=1),
        SamplingParams(top_p=0.9, seed=2),
        SamplingParams(top_k=50, min_p=0.001, seed=3),
        SamplingParams(seed=4),
        SamplingParams(temperature=1e-5, top_p=0.5, seed=5),
        SamplingParams(temperature=0.9, min_p=0.05, seed=6),
    ]
    pair = Pair(laws, vocab)
    ours, wanted, _, _ = pair.draw(logits_of(6, vocab, seed=1), list(range(6)))
    check(ours, wanted)


def test_alternatives_beside_drawn_ids() -> None:
    pair = Pair(list(EVERY.values()), top=4)
    ours, wanted, top, wanted_top = pair.draw(logits_of(len(EVERY)), list(range(len(EVERY))))
    check(ours, wanted)
    assert torch.equal(top[0].cpu(), wanted_top[0])
    torch.testing.assert_close(top[1].cpu(), wanted_top[1], rtol=0, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_faults_are_flagged_and_alone(bad: float) -> None:
    """A row that is not finite; one whose allowed ids have no support; one whose bias overflows; one that is well."""
    laws = [LAWS["top_p"], SamplingParams(allowed_ids=(3, 5), logit_bias={3: float("-inf"), 5: float("-inf")})]
    laws += [SamplingParams(logit_bias={7: 3e38}), LAWS["filters"], LAWS["plain"]]
    logits = logits_of(5)
    logits[0, 9] = bad
    logits[2, 7] = 3e38
    ours, wanted, _, _ = Pair(laws).draw(logits, list(range(5)))
    check(ours, wanted)
    assert ours[1].tolist() == [NONFINITE, EMPTY_SUPPORT, NONFINITE, 0, 0]
    assert ours[0][:3].tolist() == [0, 0, 0]
    assert ours[2][:, :3].isnan().all()
