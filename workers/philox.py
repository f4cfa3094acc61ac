"""Counter-based random numbers (Philox4x64-10; Salmon et al., SC '11), many streams at once.

The same numbers as `numpy.random.Generator(numpy.random.Philox(key, counter)).random()`, of which numpy makes one
stream at a time.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
# One column each: counter words 0 and 2 are multiplied, key words 0 and 1 are bumped from round to round.
_MULTIPLIERS: Words = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_MULTIPLIERS_HIGH: Words = _MULTIPLIERS >> _HALF
_MULTIPLIERS_LOW: Words = _MULTIPLIERS & _LOW
_BUMPS: Words = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)


def uniforms(seeds: Words, streams: Words, counters: Words) -> NDArray[np.float64]:
    """Numbers in [0, 1), one each: of the stream keyed by (seed, stream), at its counter; all uint64 [n]."""
    key = np.stack((seeds, streams))  # [2, n]
    # numpy counts up before it draws.
    multiplied = np.stack((counters + np.uint64(1), np.zeros_like(counters)))  # words 0 and 2
    others = np.zeros_like(multiplied)  # words 1 and 3
    for round_number in range(_NUM_ROUNDS):
        if round_number:
            key = key + _BUMPS
        high, low = _high_half(multiplied), _MULTIPLIERS * multiplied
        multiplied = high[::-1] ^ others ^ key
        others = low[::-1]
    numbers: NDArray[np.float64] = (multiplied[0] >> np.uint64(11)) * 2.0**-53
    return numbers


def _high_half(words: Words) -> Words:
    """The upper 64 bits of the products with the multipliers."""
    words_high, words_low = words >> _HALF, words & _LOW
    cross = _MULTIPLIERS_HIGH * words_low
    # Below 2⁶⁴: a product of two halves is at most (2³² − 1)², and what is added at most 2 · (2³² − 1).
    middle = _MULTIPLIERS_LOW * words_high + (cross & _LOW)
    middle += (_MULTIPLIERS_LOW * words_low) >> _HALF
    high: Words = _MULTIPLIERS_HIGH * words_high + (cross >> _HALF) + (middle >> _HALF)
    return high
