"""The sampler's draws as kernels. What no kernel does (penalties, bias, alternatives, prompt scores) is the twin's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.kernels.cut import find_cuts
from engine.kernels.sample import Special, sample
from engine.request import IntArray
from engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class StepLaw:
    """The laws of a step's rows, on the host.

    temperature: float32[S], 1 where greedy. greedy: bool[S]. keys: int64[S, 5], noise keys with the position.
    top_k, top_p: float64[S], 0 and 1 where off. min_p: float32[S], 0 where off.
    edits: a row has penalties, bias or allowed ids. alternatives: a row wants some.
    """

    temperature: npt.NDArray[np.float32]
    greedy: npt.NDArray[np.bool_]
    keys: npt.NDArray[np.int64]
    top_k: npt.NDArray[np.float64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    edits: bool
    alternatives: bool

    @property
    def any_k(self) -> bool:
        return bool((self.top_k > 0).any())

    @property
    def any_p(self) -> bool:
        return bool((self.top_p < 1).any())

    @property
    def special(self) -> bool:
        """Some row is drawn from other weights than those of its logits."""
        return self.edits or self.any_k or self.any_p or bool((self.min_p > 0).any())


class CudaSampler(Sampler):
    """`Sampler` with `draw` for the rows of a step."""

    def law(self, slots: IntArray, positions: IntArray) -> StepLaw:
        """slots, positions: as for `sample`."""
        rows = self._slots[slots]
        return StepLaw(
            temperature=rows["temperature"],
            greedy=rows["greedy"],
            keys=np.concatenate((rows["key"], positions[:, None]), axis=1, dtype=np.int64),
            top_k=rows["top_k"].astype(np.float64),
            top_p=rows["top_p"],
            min_p=rows["min_p"],
            edits=bool((rows["penalised"] | rows["offset"]).any()),
            alternatives=bool((rows["top"] > 0).any()),
        )

    @torch.inference_mode()
    def draw(
        self, logits: Tensor, slots: IntArray, law: StepLaw, fixed: Mapping[str, Tensor], last_token: Tensor
    ) -> Tensor:
        """Sample one token a row into `last_token`; then count it, where its slot has penalties.

        fixed: the arrays of `law` on the device (`CudaInput.fixed`). Returns int32[5, S], as `kernels.sample.sample`.
        """
        rows, count = self._slots[slots], len(slots)
        temperature, slots_there = fixed["temperature"][:count], fixed["sample_slots"]
        arguments = logits, temperature, fixed["greedy"], fixed["keys"], slots_there, last_token
        if not law.special:
            return sample(*arguments)
        edited = self._edited(logits, slots, rows, self._counts(slots, rows))
        cuts = find_cuts(
            edited, temperature, fixed["top_k"][:count], fixed["top_p"][:count], any_k=law.any_k, any_p=law.any_p
        )
        drawn = sample(*arguments, Special(edited, cuts, fixed["min_p"]))
        self._count(slots, rows, drawn[0].to(torch.int64))
        return drawn

    @torch.inference_mode()
    def alternatives(self, logits: Tensor, slots: IntArray) -> tuple[Tensor, Tensor]:
        """The likeliest ids of the rows that want some, before any of the step is drawn: `top_ids` and `top_logprobs`
        as in `Sampled`."""
        rows = self._slots[slots]
        asked = np.flatnonzero(rows["top"] > 0)
        some, index = slots[asked], self._upload(asked)
        laws = self._distributions(logits.index_select(0, index), some, rows[asked], self._counts(some, rows[asked]))
        ids, logprobs = self._alternatives(laws, rows[asked])
        shape = len(slots), ids.shape[1]
        all_ids = torch.zeros(shape, dtype=torch.int64, device=logits.device)
        nothing = torch.full(shape, float("nan"), device=logits.device)
        return all_ids.index_copy_(0, index, ids), nothing.index_copy_(0, index, logprobs)
