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
