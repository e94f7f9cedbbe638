"""One call of each op of ``schemas``, with the arguments this tree gives; for checks.

Used where results are compared: CPU with Meta, ours with the wheel's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ascend.ops.dtype_codes import code_of

_T, _D, _E, _K = 3, 8, 4, 2


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A call with arguments made on any device.

    Attributes:
        name: The op's name.
        make: Returns positional and keyword arguments for a device.
    """

    name: str
    make: Callable[[torch.device], tuple[tuple[Any, ...], dict[str, Any]]]

    def results(self, device: torch.device) -> list[torch.Tensor]:
        """Call on a device; the tensors it returns, in order."""
        arguments, keywords = self.make(device)
        returned = getattr(torch.ops.npu, self.name)(*arguments, **keywords)
        return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def sample_calls() -> list[SampleCall]:
    """Return a call of each op."""
    return _dense_calls() + _expert_calls()


def _dense_calls() -> list[SampleCall]:
    return [
        SampleCall("npu_rms_norm", lambda d: ((_floats(d, _T, _D), _floats(d, _D), 1e-6), {})),
        SampleCall(
            "npu_rotary_mul",
            lambda d: (
                (
                    _wide(d, _T, 1, 2, _D),
                    _wide(d, _T, 1, 1, _D),
                    _wide(d, _T, 1, 1, _D),
                    "interleave",
                ),
                {},
            ),
        ),
        SampleCall(
            "npu_clipped_swiglu",
            lambda d: (
                (_floats(d, _T, _D),),
                {"alpha": 1.0, "limit": 10.0, "bias": 0.0, "interleaved": False},
            ),
        ),
        SampleCall(
            "npu_mhc_post",
            lambda d: (
                (_floats(d, _T, 4, _D), _wide(d, _T, 4, 4), _floats(d, _T, _D), _wide(d, _T, 4)),
                {},
            ),
        ),
        SampleCall(
            "npu_scatter_nd_update_",
            lambda d: ((_int8s(d, _T, 2, _D), _int32s(d, 1, 2), _int8s(d, 1, _D)), {}),
        ),
        SampleCall("npu_dynamic_quant", lambda d: ((_floats(d, _T, _D),), {})),
        SampleCall(
            "npu_quant_matmul",
            lambda d: (
                (_int8s(d, _T, _D), _int8s(d, _D, 5), _wide(d, 5)),
                {"pertoken_scale": _wide(d, _T), "output_dtype": code_of(torch.bfloat16)},
            ),
        ),
        SampleCall("npu_format_cast", lambda d: ((_int8s(d, _T, _D), 29), {})),
    ]


def _expert_calls() -> list[SampleCall]:
    return [
        SampleCall(
            "npu_moe_init_routing_v2",
            lambda d: (
                (_floats(d, _T, _D), _int32s(d, _T, _K)),
                {
                    "scale": _wide(d, _T),
                    "active_num": _T * _K,
                    "expert_num": _E,
                    "expert_tokens_num_type": 1,
                    "expert_tokens_num_flag": True,
                    "active_expert_range": [0, _E],
                },
            ),
        ),
        SampleCall(
            "npu_moe_token_unpermute",
            lambda d: ((_floats(d, _T * _K, _D), _int32s(d, _T * _K), _floats(d, _T, _K)), {}),
        ),
        SampleCall(
            "npu_grouped_matmul",
            lambda d: (
                ([_int8s(d, _E, _D)], [_int8s(d, _E, _D, 5)]),
                {
                    "scale": [_wide(d, _E, 5)],
                    "per_token_scale": [_wide(d, _E)],
                    "group_list": _counts(d),
                    "split_item": 2,
                    "group_type": 0,
                    "group_list_type": 1,
                    "output_dtype": code_of(torch.bfloat16),
                },
            ),
        ),
    ]


def _floats(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device=device)


def _wide(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device=device)


def _int8s(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int8, device=device)


def _int32s(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _counts(device: torch.device) -> torch.Tensor:
    return torch.full((_E,), 1, dtype=torch.int64, device=device)
