import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import exponential, gumbel, philox, words

WORD = st.integers(0, 2**32 - 1)
GOLDEN_WORDS = [2584951396, 2056328847, 1597098797, 1942771040, 1790459004, 4003313875]
GOLDEN_EXPONENTIALS = ["0x3f6bc2cf", "0x3f26cdb2", "0x3eee121b", "0x3f1a22dc", "0x3f0a12f0", "0x402c22f3"]
GOLDEN_GUMBELS = ["0x3da8abd4", "0x3edb5222", "0x3f4408a4", "0x3f01e11a", "0x3f1e0d21", "0xbf7d49a2"]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """The published algorithm on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox(torch.tensor(counter).view(4, 1), torch.tensor(key).view(2, 1)).flatten().tolist() == expected


@settings(deadline=None)
@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_philox_equals_the_algorithm_on_integers(counter: list[int], key: list[int]) -> None:
    out = philox(torch.tensor(counter).view(4, 1, 1), torch.tensor(key).view(2, 1, 1))
    assert out.flatten().tolist() == philox_by_hand(counter, key)


@settings(deadline=None)
@given(st.lists(WORD, min_size=5, max_size=5), st.integers(0, 1001))
def test_each_part_of_the_key_is_a_word_of_its_own(key: list[int], token: int) -> None:
    seed_low, seed_high, sample_index, segment, position = key
    block = philox_by_hand([token // 4, position, segment, sample_index], [seed_low, seed_high])
    assert int(words(torch.tensor([key]), 1002)[0, token]) == block[token % 4]


def test_no_two_keys_share_their_noise() -> None:
    keys = [[7, 0, 1, 0, 5], [8, 0, 0, 0, 5], [7, 0, 0, 1, 5], [7, 0, 0, 0, 6], [7, 1, 0, 0, 5], [7, 0, 0, 0, 5]]
    out = words(torch.tensor(keys), 4096)
    for one in range(len(keys)):
        for other in range(one):
            # Two independent streams of 4096 words agree somewhere with probability 1e-6.
            assert not (out[one] == out[other]).any(), (keys[one], keys[other])
    assert len(out.unique()) > out.numel() - 5


def test_noise_depends_on_its_key_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**32, (9, 5), generator=generator)
    together = gumbel(keys, 30_001)  # several slices, and a last block of one word
    for row in (0, 4, 8):
        alone = gumbel(keys[row : row + 1], 30_001)[0]
        assert torch.equal(bits(alone), bits(together[row]))
        assert torch.equal(bits(alone[:17]), bits(gumbel(keys[row : row + 1], 17)[0]))
    assert torch.equal(bits(gumbel(keys.flip(0), 30_001)), bits(together.flip(0)))


def test_a_word_gives_the_same_bits_wherever_it_stands() -> None:
    """Library logarithms differ between the vectorised body of an array and its tail."""
    word = torch.randint(0, 2**32, (1003,), generator=torch.Generator().manual_seed(1))
    whole = exponential(word)
    one_by_one = torch.cat([exponential(word[i : i + 1]) for i in range(len(word))])
    assert torch.equal(bits(whole), bits(one_by_one))


def test_the_bits_are_these() -> None:
    """For other implementations (docs/sampling.md) and against a change that nobody meant."""
    key = torch.tensor([[0x9ABCDEF0, 0x12345678, 3, 2, 1000]])
    assert words(key, 6)[0].tolist() == GOLDEN_WORDS
    assert [hex(b & 0xFFFFFFFF) for b in bits(exponential(words(key, 6)))[0].tolist()] == GOLDEN_EXPONENTIALS
    assert [hex(b & 0xFFFFFFFF) for b in bits(gumbel(key, 6))[0].tolist()] == GOLDEN_GUMBELS


def test_the_documented_recipe_gives_the_same_bits_in_numpy() -> None:
    """docs/sampling.md, operation by operation."""
    one, two, half, scale = (np.float32(value) for value in (1, 2, 0.5, 2.0**-32))
    c0, c1, c2 = (np.float32(c) for c in (0.6666668653488159, 0.3998875021934509, 0.29580992460250854))
    ln2 = np.float32(0.6931471805599453)

    def split(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        b = c.view(np.int32)
        k = (b - 0x3F3504F3) >> 23
        return k, (b - (k << 23)).view(np.float32) - one

    def log(k: np.ndarray, f: np.ndarray) -> np.ndarray:
        s = f / (f + two)
        q = s * s
        p = ((q * c2 + c1) * q + c0) * q
        return (p + two) * s + k.astype(np.float32) * ln2

    rng = np.random.default_rng(4)
    x = np.concatenate((np.arange(200), 2**32 - 1 - np.arange(200), rng.integers(0, 2**32, 20_000)))
    nu = -((x.astype(np.float32) + half) * scale)
    k, f = split((((1 << 32) - 1 - x).astype(np.float32) + half) * scale)
    e = -log(k, np.where(k == 0, nu, f))
    assert e.dtype == np.float32
    np.testing.assert_array_equal(exponential(torch.from_numpy(x)).numpy().view(np.int32), e.view(np.int32))
    keys = torch.from_numpy(rng.integers(0, 2**32, (3, 5)))
    wanted = -log(*split(exponential(words(keys, 5000)).numpy()))
    np.testing.assert_array_equal(gumbel(keys, 5000).numpy().view(np.int32), wanted.view(np.int32))


def test_exponentials_are_exact_to_float32_at_both_ends() -> None:
    edge = 1 << 16
    word = torch.cat(
        (
            torch.arange(edge),
            torch.arange(2**32 - edge, 2**32),
            torch.arange(2**31 - edge, 2**31 + edge),
            # around u = 1 - sqrt(1/2), where the two formulas meet
            torch.arange(-edge, edge) + int((1 - math.sqrt(0.5)) * 2**32),
            torch.randint(0, 2**32, (1 << 18,), generator=torch.Generator().manual_seed(2)),
        )
    )
    u = (word.numpy().astype(np.longdouble) + np.longdouble(0.5)) / 2**32
    np.testing.assert_allclose(exponential(word).double().numpy(), (-np.log1p(-u)).astype(np.float64), rtol=3e-7)


def test_exponentials_are_finite_and_positive_where_float32_u_is_0_or_1() -> None:
    out = exponential(torch.tensor([0, 2**32 - 1])).tolist()
    assert out[0] == pytest.approx(0.5 / 2**32, rel=1e-6)
    assert out[1] == pytest.approx(33 * math.log(2), rel=1e-6)


def test_exponentials_never_decrease_with_the_word() -> None:
    word = torch.arange(0, 2**32, 9973)
    assert bool((exponential(word).diff() >= 0).all())


def test_gumbel_noise_is_gumbel() -> None:
    sample = gumbel(torch.tensor([[1, 0, 0, 0, position] for position in range(20)]), 20_000).double().numpy()
    assert scipy.stats.kstest(sample.ravel(), "gumbel_r").pvalue > 0.01
    # Neighbours in position and in vocabulary are independent.
    assert abs(np.corrcoef(sample[:-1].ravel(), sample[1:].ravel())[0, 1]) < 0.006
    assert abs(np.corrcoef(sample[:, :-1].ravel(), sample[:, 1:].ravel())[0, 1]) < 0.006
