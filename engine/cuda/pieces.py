"""CUDA graphs of steps that hold prompt tokens: the forward pass in pieces, cut at attention.

What attention launches depends on who attends to what; all else depends on the number of tokens alone. So a pass over
so many tokens is captured as layers + 1 graphs, and attention goes between them. Launched one by one, the kernels of a
step take the host longer than they take the GPU, up to some 1,500 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.paged_step import MixedStep
from engine.attention.torch_paged import AttentionStep
from engine.cuda.graphs import bucket_for
from engine.memory.memory import KVPool
from engine.start.progress import CAPTURING_PIECES, Progress

LARGEST = 2048
"""Tokens from which on a step keeps the GPU busy for longer than it takes to launch."""


def token_buckets(most: int) -> list[int]:
    """Numbers of tokens worth a capture, up to `LARGEST` or to exactly `most`, padded by at most 31 or a quarter. Up to
    some 200 tokens padding costs little: a step takes as long as the weights take to be read."""
    sizes = [8, 16, 32, 48, *range(64, 256, 32), *range(256, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256)]
    largest = min(most, LARGEST)
    return [*(size for size in sizes if size < largest), largest]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A pass over T tokens. queries: of each layer, dtype[T, heads, head_dim], where its piece leaves them. attended:
    dtype[T, heads * head_dim], where the piece behind a layer's attention reads. residual: dtype[T, hidden], the
    result. All of it is memory of the graphs, good until the next pass."""

    graphs: tuple[torch.cuda.CUDAGraph, ...]
    queries: tuple[Tensor, ...]
    attended: Tensor
    residual: Tensor

    def run(self, tokens: int, attention: MixedStep, kv: KVPool) -> Tensor:
        """Over the first `tokens` of its input; attends between the pieces. The residual, dtype[tokens, hidden]."""
        for graph, q, keys, values in zip(self.graphs[:-1], self.queries, kv.keys, kv.values, strict=True):
            graph.replay()
            attention.write(q[:tokens], keys, values, self.attended[:tokens].view(tokens, *q.shape[1:]))
        self.graphs[-1].replay()
        return self.residual[:tokens]


class MixedGraphs:
    """Pieces by bucket. step: a pass over so many tokens on the current stream, which attends as it is told, and its
    residual. attended: dtype[largest of sizes, heads * head_dim]."""

    def __init__(
        self,
        sizes: Sequence[int],
        step: Callable[[int, AttentionStep], Tensor],
        attended: Tensor,
        progress: Progress,
    ) -> None:
        self._sizes = sorted(sizes)
        self._pieces: dict[int, Pieces] = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        for done, size in enumerate(reversed(self._sizes), start=1):
            with torch.cuda.stream(stream):
                self._pieces[size] = _captured(step, size, attended[:size], pool)
            progress(CAPTURING_PIECES, done, len(self._sizes))
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # of the passes ahead of the captures: nothing runs on that stream again

    def bucket(self, tokens: int) -> int | None:
        """The smallest bucket that holds `tokens`; None when none does."""
        return bucket_for(tokens, self._sizes)

    def of(self, bucket: int) -> Pieces:
        return self._pieces[bucket]


class _Cuts:
    """Attention as a capture sees it: one piece ends, the next one begins."""

    def __init__(self, attended: Tensor, pool: Any) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.queries: list[Tensor] = []
        self._attended = attended
        self._pool = pool

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:  # noqa: ARG002
        self.end()
        self.queries.append(borrowed(q))
        self.begin()
        return self._attended


def _captured(step: Callable[[int, AttentionStep], Tensor], tokens: int, attended: Tensor, pool: Any) -> Pieces:
    step(tokens, MixedStep(None, None))  # compiles what is not compiled, and lets cuBLAS choose
    torch.cuda.synchronize()
    cuts = _Cuts(attended, pool)
    cuts.begin()
    try:
        residual = step(tokens, cuts)
    finally:
        cuts.end()
    for graph in cuts.graphs:
        graph.replay()  # the first replay takes the graph to the device
    return Pieces(tuple(cuts.graphs), tuple(cuts.queries), attended, borrowed(residual))


class _Place:
    """Memory, by an interface that torch reads and that knows no bfloat16."""

    def __init__(self, tensor: Tensor) -> None:
        shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, contiguous, without keeping it: what is read before the next piece runs need not be held, or
    every layer of every bucket would take memory of its own."""
    assert tensor.is_contiguous()
    return torch.as_tensor(_Place(tensor), device=tensor.device).view(tensor.dtype)
