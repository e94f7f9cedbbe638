"""What quantised rows mean, worked out number by number in float64: no bytes, no bit tricks."""

import torch

FP8_MAX = 448.0


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 3 mantissa bits, ties to even; below 2^-6 in steps of 2^-9."""
    wide = values.double()
    _, exponent = torch.frexp(wide)
    step = torch.exp2((exponent - 1).clamp(min=-6).double() - 3)
    return (wide / step).round() * step


def round_key(values: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """A5 keys [N, head_dim]: fp8 with a power of two per 64 values; the rotary ones in bf16."""
    parts = []
    plain = values[:, : values.shape[1] - rope_dim].double()
    for part in plain.split(64, 1):
        largest = part.abs().amax(1, keepdim=True)
        power = torch.full_like(largest, 2.0**-126)
        while (too_small := largest > FP8_MAX * power).any():
            power = torch.where(too_small, 2 * power, power)
        parts.append(round_e4m3(part / power) * power)
    rotary = values[:, -rope_dim:].bfloat16().double()
    return torch.cat([*parts, rotary], 1)


def round_index_key(values: torch.Tensor) -> torch.Tensor:
    """A5 index keys [N, width]: fp8 with an fp32 scale per row."""
    scale = values.float().abs().amax(1, keepdim=True) / FP8_MAX
    divided = torch.where(scale > 0, values.float() / scale, 0.0)
    return round_e4m3(divided.clamp(-FP8_MAX, FP8_MAX)) * scale


def round_int8_key(values: torch.Tensor) -> torch.Tensor:
    """A2 and A3 index keys [N, width]: int8 with an fp16 scale per row."""
    scale = (values.float().abs().amax(1, keepdim=True) / 127).half().float()
    divided = torch.where(scale > 0, values.float() / scale, 0.0)
    return divided.round().clamp(-127, 127) * scale
