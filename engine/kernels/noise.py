"""The noise of engine/sampling/noise.py on the GPU, bit for bit.

Callers launch with `enable_fp_fusion=False`: a fused multiply-add would round once where the twin rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

M0 = tl.constexpr(0xD2511F53)
M1 = tl.constexpr(0xCD9E8D57)
W0 = tl.constexpr(0x9E3779B9)
W1 = tl.constexpr(0xBB67AE85)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
LN2 = tl.constexpr(0.6931471805599453)
ATANH_0 = tl.constexpr(0.6666668653488159)
ATANH_1 = tl.constexpr(0.3998875021934509)
ATANH_2 = tl.constexpr(0.29580992460250854)


@triton.jit
def words(key, quad):
    """Philox4x32-10 words of ids 4 * quad .. 4 * quad + 3, in id order. key: pointer to int64[5]; quad: int32[N]."""
    k0 = tl.load(key).to(tl.uint32)
    k1 = tl.load(key + 1).to(tl.uint32)
    c0 = quad.to(tl.uint32)
    c1 = tl.full(quad.shape, 0, tl.uint32) + tl.load(key + 4).to(tl.uint32)
    c2 = tl.full(quad.shape, 0, tl.uint32) + tl.load(key + 3).to(tl.uint32)
    c3 = tl.full(quad.shape, 0, tl.uint32) + tl.load(key + 2).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, M0), c0 * M0
        high1, low1 = tl.umulhi(c2, M1), c2 * M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += W0
        k1 += W1
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def gumbel(word):
    """uint32[N] -> float32[N]: -log(exponential), the exponential from both tails of the word."""
    minus_u = (word.to(tl.float32) + 0.5) * -2.3283064365386963e-10
    complement = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    exponent, fraction = _split(complement)
    exponential = -_log(exponent, tl.where(exponent == 0, minus_u, fraction))
    exponent, fraction = _split(exponential)
    return -_log(exponent, fraction)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(exponent, fraction):
    s = tl.div_rn(fraction, fraction + 2.0)
    square = s * s
    series = ((((square * ATANH_2 + ATANH_1) * square) + ATANH_0) * square + 2.0) * s
    return series + exponent.to(tl.float32) * LN2
