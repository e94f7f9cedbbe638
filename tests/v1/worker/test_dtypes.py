"""Dtype names."""

import pytest
import torch

from vllm.exceptions import ConfigError
from vllm.v1.worker.dtypes import resolve_cache_dtype, resolve_dtype


def test_names_and_dtypes() -> None:
    assert resolve_dtype("half") is torch.float16
    assert resolve_dtype(torch.bfloat16) is torch.bfloat16
    assert resolve_cache_dtype("auto", torch.float16) is torch.float16
    assert resolve_cache_dtype("bfloat16", torch.float32) is torch.bfloat16
    assert resolve_cache_dtype("int8", torch.float32) is torch.int8


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="'auto' is unknown"):
        resolve_dtype("auto")
    with pytest.raises(ConfigError, match="'fp8' is not supported"):
        resolve_cache_dtype("fp8", torch.float32)
    with pytest.raises(ConfigError, match="'int8' is unknown"):
        resolve_dtype("int8")
