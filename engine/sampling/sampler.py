"""From logits to tokens and their logprobs, row by row under each slot's law.

The host knows which rows want what; it groups them by index, so that a plain row (no filter, penalty, bias or
allowed ids) pays for none of it, and nothing on the device is asked for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import LOGPROB_MODES, IntArray
from engine.sampling import law, noise
from engine.sampling.penalties import Penalties, SlotRows
from engine.step import EMPTY_SUPPORT, NONFINITE, SlotStart

_SCORE_SLICE = 1 << 22
"""Logits scored at a time: bounds the temporaries of `score` (a few times 16 MiB)."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled, on the device.

    token_ids: int64[S], inside the vocabulary, 0 where flagged. flags: uint8[S], NONFINITE | EMPTY_SUPPORT.
    logprobs: float32[3, S] in the order of LOGPROB_MODES; NaN where flagged, and for `raw` where the slot did not
        ask for it and it costs a pass of its own.
    top_ids, top_logprobs: int64[S, k], float32[S, k], best first, k the largest asked for; None when k is 0. Rows that
        asked for fewer have more; rows that asked for none have 0 and NaN; ids outside the support have -inf.
    """

    token_ids: Tensor
    logprobs: Tensor
    flags: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None


@dataclass(frozen=True, slots=True)
class _Distributions:
    """Rows of log-weights [N, V] (maximum 0) and their log-normalisers [N].

    plain: (z - max) / T; chosen: after the slot's whole law; raw: (z - max), of the rows `raw_rows` only.
    """

    plain: Tensor
    plain_normaliser: Tensor
    chosen: Tensor
    chosen_normaliser: Tensor
    raw: Tensor
    raw_normaliser: Tensor
    raw_rows: npt.NDArray[np.int64]
    flags: Tensor


class Sampler:
    """Sampling state of `num_slots` slots. A slot that was never started samples at T = 1 with an all-zero key."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots = np.full(num_slots, law.NEUTRAL)
        self._penalties = Penalties(vocab_size, num_slots, device)
        self._offsets = SlotRows((vocab_size,), torch.float32, num_slots, device)

    def start(self, start: SlotStart) -> None:
        """Give the slot a request's law and noise key and rebuild its counts; before the step that `start` is of."""
        params, slot = start.params, start.slot
        row = law.row(params, start.logprob_modes, start.top_logprobs, self._vocab_size)
        self._slots[slot] = row
        if row["penalised"]:
            self._penalties.start(slot, start.token_ids, start.sampled)
        else:
            self._penalties.stop(slot)
        if row["offset"]:
            allowed, bias = params.allowed_ids, params.logit_bias
            law.fill_offset(
                self._offsets.take(slot),
                None if allowed is None else self._upload(np.array(allowed, np.int64)),
                self._upload(np.array(list(bias), np.int64)),
                self._upload(np.array(list(bias.values()), np.float32)),
            )
        else:
            self._offsets.drop(slot)

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: IntArray, positions: IntArray) -> Sampled:
        """Sample one token a row; then count it, where its slot has penalties.

        logits: float32[S, V] on the device, not written. slots: int32[S].
        positions: int32[S], absolute position of the token that is sampled (context + queries of the row).
        """
        rows = self._slots[slots]
        laws = self._distributions(logits, slots, rows, self._counts(slots, rows))

        scores = laws.chosen
        drawn = np.flatnonzero(~rows["greedy"])
        if len(drawn):
            keys = np.concatenate((rows["key"][drawn], positions[drawn, None]), axis=1, dtype=np.int64)
            scores = self._add(scores, drawn, noise.gumbel(self._upload(keys), self._vocab_size))
        token_ids = torch.where(laws.flags == 0, scores.argmax(-1), 0)
        self._count(slots, rows, token_ids)
        top_ids, top_logprobs = self._alternatives(laws, rows) if rows["top"].any() else (None, None)
        return Sampled(token_ids, self._logprobs(laws, rows, token_ids), laws.flags, top_ids, top_logprobs)

    @torch.inference_mode()
    def score(self, logits: Tensor, slot: int, start: int, targets: IntArray) -> Tensor:
        """float32[3, q]: logprobs of given ids under the slot's law, in the order of LOGPROB_MODES.

        logits: float32[q, V], of the queries at absolute positions [start, start + q). targets: int32[q], the id after
        each; penalties see the ids up to and with the query, of the sequence the slot started with.
        NaN where the target is -1, where the row is not finite or has no support, and for `raw` as in `Sampled`. An id
        outside the support of the law scores -inf under `processed`. Sliced: memory does not grow with q.
        """
        out = torch.full((len(LOGPROB_MODES), len(targets)), float("nan"), device=self._device)
        step = max(1, _SCORE_SLICE // self._vocab_size)
        for first in range(0, len(targets), step):
            part = targets[first : first + step]
            slots = np.full(len(part), slot, np.int32)
            rows = self._slots[slots]
            penalised = rows["penalised"][0]
            counts = self._penalties.counts_along(slot, start + first + 1, len(part)) if penalised else None
            laws = self._distributions(logits[first : first + step], slots, rows, counts)
            ids = self._upload(part.astype(np.int64))
            scored = self._logprobs(laws, rows, ids.clamp(min=0))
            out[:, first : first + step] = torch.where(ids < 0, float("nan"), scored)
        return out

    def _counts(self, slots: IntArray, rows: npt.NDArray[Any]) -> Tensor | None:
        """int32[P, 2, V] of the penalised rows, before the tokens of this step; None if there is none."""
        penalised = slots[rows["penalised"]]
        return self._penalties.counts(penalised) if len(penalised) else None

    def _count(self, slots: IntArray, rows: npt.NDArray[Any], token_ids: Tensor) -> None:
        """Count what was sampled, int64[N], where a row has penalties."""
        penalised = np.flatnonzero(rows["penalised"])
        if len(penalised):
            self._penalties.add(slots[penalised], token_ids.index_select(0, self._upload(penalised)))

    def _distributions(
        self, logits: Tensor, slots: IntArray, rows: npt.NDArray[Any], counts: Tensor | None
    ) -> _Distributions:
        """counts: int32[P, 2, V] of the penalised rows."""
        temperature = self._column(rows, "temperature")
        smallest, largest = logits.aminmax(dim=-1)
        finite = smallest.isfinite() & largest.isfinite()  # aminmax hands on a NaN
        flags = torch.where(finite, 0, NONFINITE).to(torch.uint8)
        plain = law.scale(logits, largest, temperature)
        plain_normaliser = law.log_normaliser(plain)

        chosen, chosen_normaliser = plain, plain_normaliser
        filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        special = np.flatnonzero(rows["penalised"] | rows["offset"] | filtered)
        if len(special):
            index = self._upload(special)
            edited = self._edited(logits.index_select(0, index), slots[special], rows[special], counts)
            top = edited.amax(-1)
            usable = top.isfinite()
            weights = law.scale(edited, top.masked_fill(~usable, 0.0), temperature.index_select(0, index))
            weights = self._filtered(weights, rows[special])
            chosen = plain.index_copy(0, index, weights)
            chosen_normaliser = plain_normaliser.index_copy(0, index, law.log_normaliser(weights))
            faults = torch.where(usable, 0, torch.where(top == law.NEVER, EMPTY_SUPPORT, NONFINITE)).to(torch.uint8)
            known = flags.index_select(0, index)
            flags = flags.index_copy(0, index, torch.where(known == 0, faults, known))

        raw, raw_normaliser, raw_rows = plain, plain_normaliser, np.flatnonzero(rows["raw"])
        if len(raw_rows):
            index = self._upload(raw_rows)
            raw = logits.index_select(0, index) - largest.index_select(0, index)[:, None]
            raw_normaliser = law.log_normaliser(raw)
        return _Distributions(plain, plain_normaliser, chosen, chosen_normaliser, raw, raw_normaliser, raw_rows, flags)

    def _edited(self, logits: Tensor, slots: IntArray, rows: npt.NDArray[Any], counts: Tensor | None) -> Tensor:
        """The logits after allowed ids, bias and penalties."""
        offset = np.flatnonzero(rows["offset"])
        if len(offset):
            taken = self._offsets.table.index_select(0, self._upload(self._offsets.rows(slots[offset])))
            logits = self._add(logits, offset, taken)
        if counts is None:
            return logits
        of = rows[rows["penalised"]]
        columns = [self._column(of, name) for name in ("repetition", "presence", "frequency")]
        return self._on(logits, rows["penalised"], lambda some: law.penalise(some, counts, *columns))

    def _filtered(self, scaled: Tensor, rows: npt.NDArray[Any]) -> Tensor:
        top_k, top_p, min_p = rows["top_k"], rows["top_p"], rows["min_p"]
        if (wanted := top_k > 0).any():
            k = top_k[wanted]
            scaled = self._on(scaled, wanted, lambda some: law.keep_top_k(some, self._upload(k), int(k.max())))
        if (wanted := top_p < 1).any():
            p = top_p[wanted]
            scaled = self._on(scaled, wanted, lambda some: law.keep_top_p(some, self._upload(p)))
        if (wanted := min_p > 0).any():
            column = self._column(rows[wanted], "min_p")
            scaled = self._on(scaled, wanted, lambda some: law.keep_min_p(some, column))
        return scaled

    def _logprobs(self, laws: _Distributions, rows: npt.NDArray[Any], token_ids: Tensor) -> Tensor:
        """float32[3, N] of one id a row."""

        def pick(table: Tensor, normaliser: Tensor, ids: Tensor) -> Tensor:
            return table.gather(1, ids[:, None])[:, 0] - normaliser

        temperature = pick(laws.plain, laws.plain_normaliser, token_ids)
        greedy = self._upload(np.ascontiguousarray(rows["greedy"]))
        processed = torch.where(greedy, temperature, pick(laws.chosen, laws.chosen_normaliser, token_ids))
        known = self._upload(np.ascontiguousarray(rows["temperature"] == 1.0))
        raw = torch.where(known, temperature, float("nan"))
        if len(laws.raw_rows):
            index = self._upload(laws.raw_rows)
            raw = raw.index_copy(0, index, pick(laws.raw, laws.raw_normaliser, token_ids.index_select(0, index)))
        stacked = torch.stack((processed, temperature, raw))
        return stacked.masked_fill(laws.flags != 0, float("nan"))

    def _alternatives(self, laws: _Distributions, rows: npt.NDArray[Any]) -> tuple[Tensor, Tensor]:
        """The most likely ids of each row that asked, one of them at least, under its primary mode."""
        count = int(rows["top"].max())
        top_ids = torch.zeros(len(rows), count, dtype=torch.int64, device=self._device)
        top_logprobs = torch.full((len(rows), count), float("nan"), device=self._device)
        wide_raw = np.zeros(len(rows), np.int64)
        wide_raw[laws.raw_rows] = np.arange(len(laws.raw_rows))
        sources = {
            law.PROCESSED: (laws.chosen, laws.chosen_normaliser, np.arange(len(rows))),
            law.TEMPERATURE: (laws.plain, laws.plain_normaliser, np.arange(len(rows))),
            law.RAW: (laws.raw, laws.raw_normaliser, wide_raw),
        }
        for mode, (table, normaliser, place) in sources.items():
            asked = np.flatnonzero((rows["primary"] == mode) & (rows["top"] > 0))
            if len(asked):
                index = self._upload(place[asked])
                ids, values = law.best(table.index_select(0, index), count)
                where = self._upload(asked)
                top_ids.index_copy_(0, where, ids)
                top_logprobs.index_copy_(0, where, values - normaliser.index_select(0, index)[:, None])
        return top_ids, top_logprobs

    def _on(self, table: Tensor, wanted: npt.NDArray[np.bool_], change: Callable[[Tensor], Tensor]) -> Tensor:
        """`table` with `change` applied to the wanted rows."""
        if wanted.all():
            return change(table)
        index = self._upload(np.flatnonzero(wanted))
        return table.index_copy(0, index, change(table.index_select(0, index)))

    def _add(self, table: Tensor, rows: npt.NDArray[np.int64], terms: Tensor) -> Tensor:
        if len(rows) == len(table):
            return table + terms
        return table.index_add(0, self._upload(rows), terms)

    def _column(self, rows: npt.NDArray[Any], name: str) -> Tensor:
        return self._upload(np.ascontiguousarray(rows[name])[:, None])

    def _upload(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
