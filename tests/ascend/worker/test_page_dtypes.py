"""``--kv-cache-dtype`` on each generation: which pages, or which error."""

import pytest
import torch

from vllm.exceptions import ConfigError
from vllm_ascend.core.geometry import Generation
from vllm_ascend.core.specs import PageDtypes
from vllm_ascend.ops.row_formats import E4M3
from vllm_ascend.worker.page_dtypes import choose_page_dtypes

A3, A5 = Generation.A2_A3, Generation.A5
INT8_PAGES = PageDtypes(torch.bfloat16, torch.int8, torch.float32)
FP8_PAGES = PageDtypes(E4M3, E4M3, torch.float32)
FLOAT_PAGES = PageDtypes(torch.float32, None, torch.float32)


@pytest.mark.parametrize(
    ("cache_dtype", "model_dtype", "generation", "expected"),
    [
        ("auto", torch.bfloat16, A3, INT8_PAGES),
        ("bfloat16", torch.float32, A3, INT8_PAGES),
        ("auto", torch.bfloat16, A5, FP8_PAGES),
        ("fp8", torch.float32, A5, FP8_PAGES),
        ("auto", torch.float32, A3, FLOAT_PAGES),
        ("auto", torch.float32, A5, FLOAT_PAGES),
        ("float32", torch.bfloat16, A5, FLOAT_PAGES),
    ],
)
def test_pages(
    cache_dtype: str, model_dtype: torch.dtype, generation: Generation, expected: PageDtypes
) -> None:
    found = choose_page_dtypes(cache_dtype, model_dtype, generation, has_float_pages=True)
    assert found == expected
    if expected is not FLOAT_PAGES:
        on_device = choose_page_dtypes(cache_dtype, model_dtype, generation, has_float_pages=False)
        assert on_device == expected


@pytest.mark.parametrize(
    ("cache_dtype", "generation", "message"),
    [
        ("fp8", A3, "fp8 is an A5's"),
        ("bfloat16", A5, "bfloat16 does not fit an A5.*auto or fp8"),
        ("float32", A3, "32-bit values has no kernels"),
        ("auto", A5, "32-bit values has no kernels"),
        ("int3", A3, "'int3' is not supported"),
        ("int8", A3, "8-bit values has no kernels"),
    ],
)
def test_refusals(cache_dtype: str, generation: Generation, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_page_dtypes(cache_dtype, torch.float32, generation, has_float_pages=False)
