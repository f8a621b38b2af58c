"""CUDA graphs of decode steps: one a bucket of batch sizes, captured largest first, into a memory pool that they share.

A graph reads its input at fixed addresses, starts from `last_token[slot]` and ends at fp32 logits at a fixed address;
the sampler runs after it, so that the filters of some rows neither slow the others nor double the captures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.start.progress import CAPTURING, Progress


def buckets(largest: int) -> list[int]:
    """Batch sizes worth a graph, up to exactly `largest`: each size is padded by at most a quarter, from 64 on 8."""
    sizes = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64]
    sizes += range(72, 257, 8)
    sizes += range(288, largest, 32)
    return [*(size for size in sizes if size < largest), largest]


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `rows`; None when none does."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


class DecodeGraphs:
    """Graphs by bucket. step: runs a decode step of so many rows on the current stream and returns its logits."""

    def __init__(self, sizes: Sequence[int], step: Callable[[int], Tensor], progress: Progress) -> None:
        self._sizes = sorted(sizes)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._capture(step, progress)

    def bucket(self, rows: int) -> int | None:
        """The smallest bucket that holds `rows`; None when none does."""
        return bucket_for(rows, self._sizes)

    def replay(self, bucket: int) -> Tensor:
        """Run the step; logits fp32[bucket, vocab], the same memory every time."""
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits

    def _capture(self, step: Callable[[int], Tensor], progress: Progress) -> None:
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes), start=1):
            step(size)  # compiles what is not compiled, and lets cuBLAS choose
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = step(size)
            self._graphs[size] = graph, logits
            progress(CAPTURING, done, len(self._sizes))
