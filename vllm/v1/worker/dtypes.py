"""Names of dtypes in flags and config files -> torch dtypes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from vllm.exceptions import ConfigError

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float32": torch.float32,
        "float": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "half": torch.float16,
    }
)


def resolve_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype of weights and activations.

    Args:
        dtype: A name, or a torch dtype; "auto" must have been resolved by the platform.

    Raises:
        ConfigError: The name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    found = _DTYPES.get(dtype)
    if found is None:
        raise ConfigError(f"dtype={dtype!r} is unknown: use one of {', '.join(_DTYPES)}.")
    return found


_CACHE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({**_DTYPES, "int8": torch.int8})


def resolve_cache_dtype(cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cached rows; "auto" is the model's.

    Raises:
        ConfigError: The name is unknown.
    """
    if cache_dtype == "auto":
        return model_dtype
    found = _CACHE_DTYPES.get(cache_dtype)
    if found is None:
        raise ConfigError(
            f"kv_cache_dtype={cache_dtype!r} is not supported: use auto or one of "
            f"{', '.join(_CACHE_DTYPES)}."
        )
    return found
