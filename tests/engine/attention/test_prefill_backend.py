from __future__ import annotations

import numpy as np
import pytest

from engine.attention.prefill_backend import choose_backend

MEASURED = [  # rows, queries, context, us of FA3 and of FA2: heads 32 and 8 of 128, pages of 16, one layer, an H200
    (1, 16, 512, 12.4, 8.7),
    (1, 16, 4096, 59.5, 14.7),
    (4, 16, 4096, 61.1, 35.6),
    (4, 32, 4096, 61.7, 46.9),
    (8, 32, 4096, 121.7, 81.8),
    (16, 32, 4096, 245.0, 153.7),
    (32, 32, 4096, 539.5, 226.9),
    (64, 32, 4096, 1219.3, 451.6),
    (1, 128, 4096, 68.9, 48.1),
    (1, 512, 4096, 71.3, 159.5),
    (1, 1024, 4096, 148.5, 246.2),
    (2, 1024, 4096, 280.4, 488.5),
    (1, 2048, 8192, 539.7, 949.6),
    (4, 128, 1024, 21.9, 75.3),
    (8, 128, 1024, 41.6, 61.3),
    (16, 128, 1024, 79.4, 118.7),
    (64, 128, 1024, 332.3, 466.3),
    (1, 512, 0, 13.7, 60.7),
    (1, 1024, 0, 34.5, 54.0),
    (1, 2048, 0, 90.4, 162.4),
    (4, 512, 0, 40.8, 49.8),
    (16, 512, 0, 137.2, 149.1),
    (1, 128, 512, 14.4, 23.2),
    (1, 256, 1024, 23.5, 42.3),
    (1, 128, 32768, 440.5, 214.0),
    (4, 64, 16384, 235.3, 228.3),
    (1, 4096, 16384, 2356.4, 3604.2),
    (2, 256, 8192, 121.5, 247.1),
    (4, 256, 8192, 241.8, 400.0),
]


@pytest.mark.parametrize(("rows", "queries", "context", "fa3", "fa2"), MEASURED)
def test_the_choice_is_never_slower_by_much_than_what_was_measured(
    rows: int, queries: int, context: int, fa3: float, fa2: float
) -> None:
    query_lens = np.full(rows, queries, np.int32)
    chosen = {"fa3": fa3, "fa2": fa2}[choose_backend(query_lens, query_lens + context, 32, 8)]
    assert chosen <= max(1.05 * min(fa3, fa2), min(fa3, fa2) + 4)


def test_one_long_chunk_among_many_short_ones_decides_by_what_all_of_them_read() -> None:
    short, long = np.full(40, 24, np.int32), np.array([4096], np.int32)
    for others, chosen in ((0, "fa3"), (2, "fa3"), (40, "fa2")):
        query_lens = np.concatenate((short[:others], long))
        contexts = np.concatenate((np.full(others, 32_768, np.int32), [0]))
        assert choose_backend(query_lens, query_lens + contexts, 32, 8) == chosen


def test_sums_beyond_32_bits_are_counted() -> None:
    query_lens = np.full(256, 32, np.int32)
    assert choose_backend(query_lens, np.full(256, 2**30, np.int32), 32, 32) == "fa3"
    assert choose_backend(query_lens, np.full(256, 2**30, np.int32), 64, 8) == "fa2"
