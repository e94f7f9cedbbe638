"""torch dtypes as the integers that ``npu::`` schemas take (c10::ScalarType)."""

from types import MappingProxyType

import torch

from vllm.exceptions import UnsupportedFeatureError

_CODES = MappingProxyType(
    {
        torch.int8: 1,
        torch.int32: 3,
        torch.float16: 5,
        torch.float32: 6,
        torch.bfloat16: 15,
    }
)


def code_of(dtype: torch.dtype) -> int:
    """Return the integer of a dtype.

    Raises:
        UnsupportedFeatureError: No call of this tree uses the dtype.
    """
    code = _CODES.get(dtype)
    if code is None:
        raise UnsupportedFeatureError(
            f"{dtype} is no result type of the NPU calls in use; choose one of "
            f"{', '.join(map(str, _CODES))}"
        )
    return code


def torch_dtype_of(code: int) -> torch.dtype:
    """Return the dtype of an integer.

    Raises:
        UnsupportedFeatureError: No call of this tree uses it.
    """
    for dtype, known in _CODES.items():
        if known == code:
            return dtype
    raise UnsupportedFeatureError(f"type code {code} is not in use; known: {dict(_CODES)}")
