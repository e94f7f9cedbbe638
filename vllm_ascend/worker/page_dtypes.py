"""From ``--kv-cache-dtype`` to the types of a device's pages."""

import torch

from vllm.exceptions import ConfigError
from vllm.v1.worker.dtypes import resolve_cache_dtype
from vllm_ascend.core.geometry import Generation
from vllm_ascend.core.specs import PageDtypes
from vllm_ascend.ops.row_formats import E4M3

_FP8 = "fp8"
_STATE = torch.float32


def choose_page_dtypes(
    cache_dtype: str,
    model_dtype: torch.dtype,
    generation: Generation,
    *,
    has_float_pages: bool,
) -> PageDtypes:
    """Return the types of a DeepSeek-V4's pages.

    A2 and A3: 16-bit rows with int8 index keys. A5: fp8 rows and index keys. fp32 rows with float
    index keys are for comparing with a CPU.

    Args:
        cache_dtype: ``--kv-cache-dtype``.
        model_dtype: What "auto" is, up to the device's own format.
        generation: The device's.
        has_float_pages: Whether fp32 rows may be kept: in reference mode.

    Raises:
        ConfigError: The type is unknown, or the device's pages do not have it.
    """
    is_a5 = generation is Generation.A5
    if cache_dtype == _FP8:
        if not is_a5:
            raise ConfigError(
                "--kv-cache-dtype fp8 is an A5's: the pages of an A2 or A3 hold 16-bit rows. Use "
                "bfloat16, or auto with --dtype bfloat16."
            )
        return PageDtypes(rows=E4M3, index=E4M3, state=_STATE)
    rows = resolve_cache_dtype(cache_dtype, model_dtype)
    if rows.itemsize != 2:
        if not (has_float_pages and rows.is_floating_point):
            raise ConfigError(
                f"a KV cache of {8 * rows.itemsize}-bit values has no kernels on an NPU: use "
                "--kv-cache-dtype auto with --dtype bfloat16."
            )
        return PageDtypes(rows=rows, index=None, state=_STATE)
    if not is_a5:
        return PageDtypes(rows=rows, index=torch.int8, state=_STATE)
    if cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {cache_dtype} does not fit an A5, whose pages hold fp8 rows: use "
            "auto or fp8."
        )
    return PageDtypes(rows=E4M3, index=E4M3, state=_STATE)
