from __future__ import annotations

import pytest

from engine.cuda.graphs import bucket_for, buckets
from engine.cuda.pieces import LARGEST, token_buckets


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 12, 33, 64, 65, 96, 100, 200, 256, 257, 300, 512, 1000])
def test_every_size_up_to_the_largest_has_a_bucket_that_holds_it(largest: int) -> None:
    """Field report 27: limits of 12, 100, 200 and 300 once had largest buckets of 8, 96, 192 and 288."""
    sizes = buckets(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    for rows in range(1, largest + 1):
        bucket = bucket_for(rows, sizes)
        assert bucket is not None
        assert rows <= bucket <= max(rows + 1, rows * 1.25)
    assert bucket_for(largest + 1, sizes) is None


def test_without_buckets_every_step_is_eager() -> None:
    assert bucket_for(1, []) is None


@pytest.mark.parametrize("most", [1, 2, 8, 17, 100, 256, 2047, 2048, 2049, 16_384])
def test_every_number_of_tokens_up_to_the_largest_has_a_bucket_with_little_padding(most: int) -> None:
    sizes = token_buckets(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, LARGEST)
    for tokens in range(1, sizes[-1] + 1):
        bucket = bucket_for(tokens, sizes)
        assert bucket is not None
        assert 0 <= bucket - tokens <= max(31, tokens / 4)
    assert bucket_for(sizes[-1] + 1, sizes) is None
