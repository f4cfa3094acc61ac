"""float8 e4m3 as whole numbers, for devices with and without instructions for it."""

import triton
import triton.language as tl

# float32 has 20 mantissa bits more than e4m3; half of the last bit kept, less one, rounds to even.
_LOST_BITS = tl.constexpr(20)
_ALMOST_HALF = tl.constexpr((1 << 19) - 1)
# Exponent biases are 127 and 7.
_BIAS_STEPS = tl.constexpr((127 - 7) << 3)
_LEAST_NORMAL = tl.constexpr(2.0**-6)
# Added to a number under 2⁻⁶, it leaves the number's multiple of 2⁻⁹ in the last bits, rounded to even.
_SUBNORMAL_SHIFT = tl.constexpr(2.0**14)
_SUBNORMAL_SHIFT_BITS = tl.constexpr((14 + 127) << 23)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7F)


@triton.jit
def e4m3_bits(numbers):
    """float32 numbers of at most ±448 (or NaN) → uint8, rounded to nearest, ties to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> _LOST_BITS) & 1
    normal = ((magnitude + _ALMOST_HALF + odd) >> _LOST_BITS) - _BIAS_STEPS
    shifted = tl.abs(numbers) + _SUBNORMAL_SHIFT
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT_BITS
    code = tl.where(tl.abs(numbers) < _LEAST_NORMAL, subnormal, normal)
    code = tl.where(magnitude > _INFINITY_BITS, _NAN, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
