"""The small floating-point formats that weights are stored in, by their bits."""

import triton
import triton.language as tl


@triton.jit
def power_of(byte):
    """e8m0 to fp32: 2^(byte - 127), the lowest of which is subnormal."""
    bits = byte.to(tl.int32)
    bits = tl.where(bits == 0, 0x00400000, bits << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(byte):
    """e4m3 to fp32, by its bits: no card needs to know the type."""
    code = byte.to(tl.int32)
    exponent = (code >> 3) & 15
    normal = (((exponent + 120) << 23) | ((code & 7) << 20)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, (code & 7).to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -value, value)


@triton.jit
def e2m1_value(code):
    """e2m1 (four bits) to fp32."""
    magnitude = code & 7
    normal = ((((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)).to(
        tl.float32, bitcast=True
    )
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def _choose(code, BIT: tl.constexpr, low, high):
    return tl.where((code >> BIT) & 1 != 0, high, low)


@triton.jit
def nf4_value(code):
    """bitsandbytes' NF4 (four bits) to fp32: one of sixteen numbers, chosen bit by bit."""
    a = _choose(code, 0, -1.0, -0.6961928009986877)
    b = _choose(code, 0, -0.5250730514526367, -0.39491748809814453)
    c = _choose(code, 0, -0.28444138169288635, -0.18477343022823334)
    d = _choose(code, 0, -0.09105003625154495, 0.0)
    e = _choose(code, 0, 0.07958029955625534, 0.16093020141124725)
    f = _choose(code, 0, 0.24611230194568634, 0.33791524171829224)
    g = _choose(code, 0, 0.44070982933044434, 0.5626170039176941)
    h = _choose(code, 0, 0.7229568362236023, 1.0)
    low = _choose(code, 2, _choose(code, 1, a, b), _choose(code, 1, c, d))
    high = _choose(code, 2, _choose(code, 1, e, f), _choose(code, 1, g, h))
    return _choose(code, 3, low, high).to(tl.float32)
