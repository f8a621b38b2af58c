"""Which of FlashInfer's prefill kernels attends faster to the chunks of a step."""

from __future__ import annotations

from typing import Literal

import numpy as np

from engine.attention.split import MULTIPROCESSORS
from engine.request import IntArray

Backend = Literal["fa2", "fa3"]

TILE = 128
"""Rows of a product of queries with keys."""


def choose_backend(query_lens: IntArray, kv_lens: IntArray, heads: int, kv_heads: int) -> Backend:
    """query_lens, kv_lens: int32[P], of a step's prefill rows.

    FA3 reads a row's KV once for every query head and `TILE` of its queries, in one program from end to end. FA2 puts
    the queries of all heads of a KV head into one tile, so that it reads KV less often, and cuts long rows into parts;
    a token takes it longer, and so does the start. The constants are a fit, in microseconds, to both on an H200 with
    heads of 128: 1 to 64 rows, 16 to 4,096 queries after up to 32,768 tokens (docs/performance.md).
    """
    kv = kv_lens.astype(np.int64)
    tiles = -(-query_lens // TILE) * heads
    packed = -(-query_lens * (heads // kv_heads) // TILE) * kv_heads
    fa3 = 4 + 0.015 * max(kv.max(), tiles @ kv / MULTIPROCESSORS)
    fa2 = 12 + 0.036 * (packed @ kv) / MULTIPROCESSORS
    return "fa2" if fa2 < fa3 else "fa3"
