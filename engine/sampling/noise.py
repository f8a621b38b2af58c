"""Counter-based noise: a pure function of (seed, sample index, segment, position, vocabulary id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 tensors, then an
exponential and a Gumbel variate built from correctly rounded float32 operations only. No library logarithm is
used: those differ in the last bit between devices, and on one device between the body and the tail of an array.
Any implementation that rounds every operation (no fused multiply-add) gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY_WORDS = 5
"""A key is (seed low, seed high, sample index, segment, position), each in [0, 2^32)."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_SQRT_HALF_BITS = 0x3F3504F3
_LN2 = 0.6931471805599453
_ATANH = (0.6666668653488159, 0.3998875021934509, 0.29580992460250854)
"""2 atanh(s) = s (2 + s^2 (c0 + s^2 (c1 + s^2 c2))) to 3e-9 relative for |s| <= 3 - 2 sqrt(2); our fit at Chebyshev
nodes."""

_SLICE = 1 << 16
"""Variates made at a time: the temporaries then stay in a CPU's cache."""


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 on words in [0, 2^32).

    counter: int64[4, ...], key: int64[2, ...] that broadcasts to the counter's shape -> int64[4, ...].
    """
    shape = counter.shape[1:]
    column = (2, *(1,) * len(shape))
    device = counter.device
    mask, half = torch.tensor((_MASK, 32), device=device).unbind()
    multipliers = torch.tensor((_MULTIPLIERS, _MULTIPLIERS[::-1]), device=device).view(2, *column).unbind()
    # Round r adds r times the Weyl constants to the key. Odd rounds want it in the other order, see below.
    weyl = torch.tensor([[w * r & _MASK for w in _WEYL] for r in range(_ROUNDS)], device=device)
    round_keys = (key + weyl.view(_ROUNDS, *column)).bitwise_and_(mask)
    round_keys[0::2] = round_keys[0::2].flip(1)
    round_key = round_keys.unbind()

    even = counter[0::2].clone()  # words 0 and 2, the ones that are multiplied
    odd = counter[1::2].clone()
    product = torch.empty_like(even)
    evens, odds, products = even.unbind(), odd.unbind(), product.unbind()
    # A round exchanges the high products of words 0 and 2. Instead of moving them, `first` says where word 0 is.
    first = 0
    for r in range(_ROUNDS):
        torch.mul(even, multipliers[first], out=product)
        torch.bitwise_right_shift(product, half, out=even)
        evens[0].bitwise_xor_(odds[1])
        evens[1].bitwise_xor_(odds[0])
        even.bitwise_xor_(round_key[r])
        even.bitwise_and_(mask)  # the shift drew in the sign, and the odd words carry their product's high half
        odd, product, odds, products = product, odd, products, odds
        first = 1 - first
    odd.bitwise_and_(mask)
    return torch.stack((evens[0], odds[0], evens[1], odds[1]))


def words(keys: Tensor, vocab_size: int) -> Tensor:
    """keys: int64[N, 5] -> int64[N, vocab_size], the random word of each row and vocabulary id.

    Counter (id // 4, position, segment, sample index), key (seed low, seed high); id takes output word id % 4.
    """
    rows = len(keys)
    quads = -(-vocab_size // 4)
    seed_low, seed_high, sample_index, segment, position = keys[:, :, None].unbind(1)
    counter = torch.empty(4, rows, quads, dtype=torch.int64, device=keys.device)
    for word, value in zip(
        counter.unbind(), (torch.arange(quads, device=keys.device), position, segment, sample_index), strict=True
    ):
        word.copy_(value)
    out = philox(counter, torch.stack((seed_low, seed_high)))
    return out.permute(1, 2, 0).reshape(rows, 4 * quads)[:, :vocab_size]


def exponential(word: Tensor) -> Tensor:
    """int64 words -> float32 standard exponentials -log1p(-u), u = (word + 0.5) / 2^32.

    Always finite and positive: where u nears 1, 1 - u is not taken from the rounded u (which may be 1) but from
    the complement of the word, so that both tails have full relative precision (3e-7), 1.2e-10 to 22.9.
    """
    minus_u = word.to(torch.float32).add_(0.5).mul_(-(2.0**-32))
    complement = (word ^ _MASK).to(torch.float32).add_(0.5).mul_(2.0**-32)
    exponent, fraction = _split(complement)
    # Near 1 the complement has lost the low bits of a small u; its fraction is -u itself.
    return _log(exponent, torch.where(exponent == 0, minus_u, fraction)).neg_()


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """keys: int64[N, 5] -> float32[N, vocab_size], -log(exponential): argmax of logits + this samples the softmax."""
    out = torch.empty(len(keys), vocab_size, dtype=torch.float32, device=keys.device)
    step = max(1, _SLICE // vocab_size)
    for first in range(0, len(keys), step):
        word = words(keys[first : first + step], vocab_size)
        torch.neg(_log(*_split(exponential(word))), out=out[first : first + step])
    return out


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Positive normal float32 x = 2^exponent * (1 + fraction), fraction in [sqrt(1/2) - 1, sqrt(2) - 1).

    -> int32 exponent, float32 fraction (exact).
    """
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS).bitwise_right_shift_(23)
    return exponent, (bits - (exponent << 23)).view(torch.float32).sub_(1.0)


def _log(exponent: Tensor, fraction: Tensor) -> Tensor:
    """log(2^exponent * (1 + fraction)) in a fixed order of rounded operations."""
    s = fraction / (fraction + 2.0)
    square = s * s
    series = (square * _ATANH[2]).add_(_ATANH[1]).mul_(square).add_(_ATANH[0]).mul_(square).add_(2.0).mul_(s)
    return series.add_(exponent.to(torch.float32).mul_(_LN2))
