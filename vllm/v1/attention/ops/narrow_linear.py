"""Products with bf16 and fp16 weights on a CPU, computed in the way that suits the processor.

Measured on an AVX-512 Xeon with bf16 instructions but no tile unit (AMX), one thread, 640 -> 4096
and 1024 -> 4096: native bf16 takes 0.6 of fp32's time at 8 rows, which wait for memory, but 1.6 to
2.4 times fp32's at 64 and 2,048 rows. So many rows are multiplied in fp32 there, the weight widened
part by part; at 2,048 rows widening costs a tenth.
"""

import torch
from torch.nn.functional import linear as torch_linear

# Both ask the processor, once.
_HAS_TILE_UNIT = torch.cpu._is_amx_tile_supported()
_HAS_BF16 = torch.cpu._is_avx512_bf16_supported()
_MAX_NATIVE_ROWS = 16
# Few rows read each part once, from the cache at best (1 MiB of fp32); many want long products.
_FEW_ROWS_VALUES = 1 << 18
_MANY_ROWS_VALUES = 1 << 22


def is_native(dtype: torch.dtype, num_rows: int) -> bool:
    """Whether products of so many rows are best left in this type."""
    if dtype not in (torch.bfloat16, torch.float16) or _HAS_TILE_UNIT:
        return True
    return dtype == torch.bfloat16 and _HAS_BF16 and num_rows <= _MAX_NATIVE_ROWS


def widened_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Maps [T, in] by ``weight`` [out, in] to fp32 [T, out], the weight widened part by part."""
    wide = x.float()
    num_values = _FEW_ROWS_VALUES if x.shape[0] <= _MAX_NATIVE_ROWS else _MANY_ROWS_VALUES
    step = max(1, num_values // weight.shape[1])
    if step >= weight.shape[0]:
        return torch_linear(wide, weight.float())
    output = wide.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], step):
        part = slice(first, first + step)
        output[:, part] = torch_linear(wide, weight[part].float())
    return output
