"""How often each id has occurred, on the device, for the slots whose law asks.

Dense rows over the vocabulary, so that a step reads and grows them without knowing its own tokens on the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.request import BoolArray, IntArray

ANYWHERE, SAMPLED = 0, 1
"""Second axis of a counts tensor: occurrences in the whole sequence; among them, the sampled ones."""


class SlotRows:
    """Rows of one shape and dtype for the slots that took one. Grows (doubling) in `take` only, never in a step."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, num_slots: int, device: torch.device) -> None:
        self.table = torch.zeros((0, *shape), dtype=dtype, device=device)
        self._row_of = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []

    def take(self, slot: int) -> Tensor:
        """The slot's row, a view of `table`; its contents are whatever was there."""
        if self._row_of[slot] < 0:
            if not self._free:
                self._grow()
            self._row_of[slot] = self._free.pop()
        return self.table[self._row_of[slot]]

    def drop(self, slot: int) -> None:
        if self._row_of[slot] >= 0:
            self._free.append(int(self._row_of[slot]))
            self._row_of[slot] = -1

    def rows(self, slots: IntArray) -> npt.NDArray[np.int64]:
        """Rows of `table` that belong to these slots, each of which has taken one."""
        return self._row_of[slots]

    def _grow(self) -> None:
        old = self.table
        size = max(1, min(2 * len(old), len(self._row_of)))
        self.table = torch.zeros((size, *old.shape[1:]), dtype=old.dtype, device=old.device)
        self.table[: len(old)].copy_(old)
        self._free.extend(range(size - 1, len(old) - 1, -1))


class Penalties:
    """Occurrence counts of the slots with penalties: int32[2, V] each (`ANYWHERE`, `SAMPLED`).

    Rebuilt from ids when a slot starts; after that only `add`, with what the sampler itself wrote, changes them.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self._counts = SlotRows((2, vocab_size), torch.int32, num_slots, device)
        self._history: dict[int, tuple[npt.NDArray[np.int64], BoolArray]] = {}

    def start(self, slot: int, token_ids: IntArray, sampled: BoolArray) -> None:
        """token_ids: int32[L], the whole sequence so far; sampled: bool[L]."""
        history = token_ids.astype(np.int64), sampled.copy()
        self._history[slot] = history
        self._counts.take(slot).zero_()
        self._count(self._counts.take(slot), *history)

    def stop(self, slot: int) -> None:
        self._counts.drop(slot)
        self._history.pop(slot, None)

    def counts(self, slots: IntArray) -> Tensor:
        """int32[P, 2, V] before the tokens of this step."""
        return self._counts.table.index_select(0, self._index(slots))

    def add(self, slots: IntArray, token_ids: Tensor) -> None:
        """Count one sampled token, int64[P], for each of these slots."""
        rows = self._index(slots)
        one = torch.ones((), dtype=torch.int32, device=rows.device)
        for kind in (ANYWHERE, SAMPLED):
            self._counts.table[:, kind].index_put_((rows, token_ids), one, accumulate=True)

    def counts_along(self, slot: int, first: int, count: int) -> Tensor:
        """int32[count, 2, V]: row j counts the first `first + j` ids of the sequence the slot started with."""
        token_ids, sampled = self._history[slot]
        out = torch.zeros((count, *self._counts.table.shape[1:]), dtype=torch.int32, device=self._counts.table.device)
        self._count(out[0], token_ids[:first], sampled[:first])
        following = token_ids[first : first + count - 1]
        rows = np.arange(1, len(following) + 1)
        one = torch.ones((), dtype=torch.int32, device=out.device)
        for kind, mask in ((ANYWHERE, slice(None)), (SAMPLED, sampled[first : first + count - 1])):
            index = self._upload(rows[mask]), self._upload(following[mask])
            out[:, kind].index_put_(index, one, accumulate=True)
        return out.cumsum(0, dtype=torch.int32)

    def _count(self, row: Tensor, token_ids: npt.NDArray[np.int64], sampled: BoolArray) -> None:
        """Add these ids to a zeroed int32[2, V]."""
        for kind, ids in ((ANYWHERE, token_ids), (SAMPLED, token_ids[sampled])):
            unique, times = np.unique(ids, return_counts=True)
            row[kind].index_copy_(0, self._upload(unique), self._upload(times.astype(np.int32)))

    def _index(self, slots: IntArray) -> Tensor:
        return self._upload(self._counts.rows(slots))

    def _upload(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).to(self._counts.table.device, non_blocking=True)
