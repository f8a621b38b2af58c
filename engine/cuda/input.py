"""A `StepPlan` packed for the GPU: a pinned buffer, and every array of the step at a known place.

Every array lies at a fixed address, so that a captured graph finds it there whatever the step: first those with one
entry a row, then block ids; the arrays of steps that hold prompt tokens come last, and are copied in such steps alone.
The device's buffer is one for all steps, since copies and kernels run in stream order. A pinned buffer is written
again only after the step that it fed was waited for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.shared import MEMBERS, Runs, find_runs, no_runs
from engine.attention.split import LEAST_SAVED, capacity, most_runs
from engine.attention.tables import Layout, Tables, lay_out
from engine.config import BLOCK_SIZE
from engine.cuda.sampler import StepLaw
from engine.memory.memory import Memory
from engine.request import IntArray
from engine.runner.input import token_places
from engine.step import StepPlan

_KINDS = {
    "slots": torch.int64,
    "positions": torch.int64,
    "write_slots": torch.int64,
    "sample_slots": torch.int64,
    "sample_tokens": torch.int64,
    "keys": torch.int64,
    "top_k": torch.float64,
    "top_p": torch.float64,
    **dict.fromkeys(Tables.names(), torch.int32),
    "temperature": torch.float32,
    "min_p": torch.float32,
    "greedy": torch.bool,
    "block_ids": torch.int32,
    "token_ids": torch.int64,
    "token_positions": torch.int64,
    "token_write_slots": torch.int64,
}
"""The arrays in the order in which they lie in the buffer. keys has five entries a row."""

TOKEN_ARRAYS = ("token_ids", "token_positions", "token_write_slots")
"""Of the tokens of a step that holds prompt tokens: decode rows first."""

_ALIGNMENT = 16


class Shared(NamedTuple):
    """What the decode rows in `slots`, int32[R], were found to share, in at most so many runs."""

    slots: IntArray
    most: int
    runs: Runs


NOBODY = Shared(np.empty(0, np.int32), 0, no_runs(0))
"""Of no slots: whatever the next decode rows are, they are looked at anew."""


class CudaInput:
    """The input arrays on the device, and a ring of pinned buffers that feed them.

    fixed: name -> view of the device's buffer, at full capacity (`_KINDS`). Of rows there is one more than can come: it
    is for padding.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, max_blocks: int, streams: int, ring: int, memory: Memory
    ) -> None:
        """streams: that attention reads at once, for each KV head."""
        self.padding_slot = max_rows
        self._streams = streams
        sizes = dict.fromkeys(_KINDS, max_rows + 1)
        sizes |= {
            "keys": 5 * max_rows,
            "block_ids": max_blocks,
            "members": most_runs(max_rows) * MEMBERS,
            "streams": streams + 1,
        }
        sizes |= dict.fromkeys(("first_tiles", "tile_counts"), max_rows + 1 + most_runs(max_rows))
        sizes |= dict.fromkeys(("tile_owners", "tile_blocks", "tile_tokens"), capacity(max_rows, streams))
        sizes |= dict.fromkeys(TOKEN_ARRAYS, max_tokens)
        offsets, end = {}, 0
        for name, kind in _KINDS.items():
            offsets[name] = end
            end = _aligned(end + sizes[name] * kind.itemsize)
        self._blocks_start = offsets["block_ids"]
        self._device = memory.allocate(end, "step input")
        self._hosts = [memory.allocate(end, "step input", host=True, pinned=True) for _ in range(ring)]

        def views(buffer: Tensor) -> dict[str, Tensor]:
            spans = (
                (name, offsets[name], offsets[name] + sizes[name] * kind.itemsize) for name, kind in _KINDS.items()
            )
            return {name: buffer[start:stop].view(_KINDS[name]) for name, start, stop in spans}

        self.fixed = views(self._device)
        self._pinned = [views(host) for host in self._hosts]
        self._host_views = [{name: view.numpy() for name, view in pinned.items()} for pinned in self._pinned]
        for host in self._host_views:
            for array in host.values():
                array[...] = 0
        self._device.zero_()
        self._shared = NOBODY
        self._layout: Layout | None = None

    def pack_decode(self, ring: int, plan: StepPlan, law: StepLaw, rows: int) -> bool:
        """A step of decode rows only, padded to `rows`: padding rows use the padding slot and the dummy block.

        Does attention cut rows into parts?
        """
        host = self._host_views[ring]
        used = plan.num_rows
        blocks = plan.block_ids[plan.block_indptr[:-1] + plan.context_lens // BLOCK_SIZE].astype(np.int64)
        host["positions"][:used] = plan.context_lens
        host["write_slots"][:used] = blocks * BLOCK_SIZE + plan.context_lens % BLOCK_SIZE
        for name, padding in (("slots", self.padding_slot), ("positions", 0), ("write_slots", 0)):
            host[name][used:rows] = padding
        split = self._pack_rows(host, plan, law, rows)
        self._copy(ring, self._blocks_start + plan.block_ids.nbytes)
        return split

    def pack_mixed(self, ring: int, plan: StepPlan, law: StepLaw, padded: int) -> tuple[bool, Tensor]:
        """Any step, its tokens padded to so many: padding is written to the dummy block. The ids of decode rows, which
        the device alone knows, are left for the caller to fill in.

        Does attention cut decode rows into parts? And int64[S], the places of the sampling rows' last tokens.
        """
        host, tokens, decodes = self._host_views[ring], plan.num_tokens, plan.num_decode
        begins, positions, write_slots = token_places(plan)
        places = (begins + plan.query_lens)[plan.samples] - 1
        host["sample_tokens"][: len(places)] = places
        split = self._pack_rows(host, plan, law, decodes)
        self._copy(ring, self._blocks_start + plan.block_ids.nbytes)
        host["token_ids"][decodes:tokens] = plan.token_ids
        host["token_positions"][:tokens] = positions
        host["token_write_slots"][:tokens] = write_slots
        for name in TOKEN_ARRAYS:
            host[name][tokens:padded] = 0
            self.fixed[name][:padded].copy_(self._pinned[ring][name][:padded], non_blocking=True)
        return split, self.fixed["sample_tokens"][: len(places)]

    def _pack_rows(
        self, host: dict[str, npt.NDArray[np.generic]], plan: StepPlan, law: StepLaw, decode_rows: int
    ) -> bool:
        used, decodes = plan.num_rows, plan.num_decode
        host["slots"][:used] = plan.slots
        host["block_ids"][: len(plan.block_ids)] = plan.block_ids
        if plan.starts:  # slots have other tenants, whether or not a row decodes in this step
            self._shared = NOBODY
        split = self._pack_tiles(host, plan, decode_rows) if decodes else False
        sampling = plan.slots[plan.samples]
        host["sample_slots"][: len(sampling)] = sampling
        host["keys"][: 5 * len(sampling)] = law.keys.reshape(-1)
        for name in ("temperature", "greedy", "top_k", "top_p", "min_p"):
            host[name][: len(sampling)] = getattr(law, name)
        return split

    def _pack_tiles(self, host: dict[str, npt.NDArray[np.generic]], plan: StepPlan, rows: int) -> bool:
        """rows: of the step, padding included. Is any row cut?"""
        decodes = plan.num_decode
        runs, lengths = self._runs(plan, most_runs(rows)), plan.context_lens[:decodes] + 1
        if self._layout is None or not self._layout.holds(lengths, runs, rows):
            self._layout = lay_out(lengths, runs, rows, self._streams)
        tables = self._layout.at(lengths, plan.block_indptr[: decodes + 1])
        for name in Tables.names():
            array = getattr(tables, name)
            host[name][: len(array)] = array
        return bool(tables.tile_counts.max() > 1)

    def _runs(self, plan: StepPlan, most: int) -> Runs:
        """Blocks are only ever appended to running rows, so the same slots share the same until one starts anew."""
        slots = plan.slots[: plan.num_decode]
        if most != self._shared.most or not np.array_equal(slots, self._shared.slots):
            runs = find_runs(plan.block_indptr[: plan.num_decode + 1], plan.block_ids, most)
            self._shared = Shared(slots.copy(), most, runs if runs.saved >= LEAST_SAVED else no_runs(len(slots)))
        return self._shared.runs

    def _copy(self, ring: int, end: int) -> None:
        self._device[:end].copy_(self._hosts[ring][:end], non_blocking=True)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
