"""The torch_npu calls this tree makes: schema, plain-torch meaning and result shapes of each.

The schemas are those of the torch-npu 2.13 wheel, character by character up to its defaults
(``make ascend-conformance`` compares them). Where torch_npu is absent, ``register_npu_ops`` gives
the ``npu::`` namespace these CPU and Meta implementations, so that every call site is checked by
torch's dispatcher and runs on a CPU. What the implementations mean is read from the wheel's
documentation; the device's rounding is not known.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm.exceptions import ConfigError
from vllm_ascend.ops import npu_meta, npu_reference


@dataclass(frozen=True, slots=True)
class NpuOp:
    """One call of torch_npu.

    Attributes:
        schema: Its signature in torch's schema language, without the namespace.
        run: Its meaning on CPU tensors.
        infer: Its results' shapes and types on Meta tensors.
    """

    schema: str
    run: Callable[..., Any]
    infer: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name within the namespace."""
        return self.schema.partition("(")[0]


NPU_OPS: tuple[NpuOp, ...] = (
    NpuOp(
        "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        npu_reference.rms_norm,
        npu_meta.rms_norm,
    ),
    NpuOp(
        "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', "
        "Tensor? rotate=None) -> Tensor",
        npu_reference.rotary_mul,
        npu_meta.rotary_mul,
    ),
    NpuOp(
        "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, "
        "float alpha=1.702, float limit=7.0, float bias=1.0, bool interleaved=True) -> Tensor",
        npu_reference.clipped_swiglu,
        npu_meta.clipped_swiglu,
    ),
    NpuOp(
        "npu_mhc_post(Tensor x, Tensor? h_res, Tensor h_out, Tensor h_post) -> Tensor",
        npu_reference.mhc_post,
        npu_meta.mhc_post,
    ),
    NpuOp(
        "npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
        npu_reference.scatter_nd_update_,
        npu_meta.scatter_nd_update_,
    ),
    NpuOp(
        "npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
        "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, "
        "int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)",
        npu_reference.moe_init_routing_v2,
        npu_meta.moe_init_routing_v2,
    ),
    NpuOp(
        "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, "
        "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
        npu_reference.moe_token_unpermute,
        npu_meta.moe_token_unpermute,
    ),
    NpuOp(
        "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
        "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
        "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, "
        "Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, "
        "int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, "
        "int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, "
        "int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) "
        "-> Tensor[]",
        npu_reference.grouped_matmul,
        npu_meta.grouped_matmul,
    ),
    NpuOp(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, "
        'Tensor? group_index=None, int? dst_type=None, str quant_mode="pertoken", '
        "float dst_type_max=0.0) -> (Tensor, Tensor)",
        npu_reference.dynamic_quant,
        npu_meta.dynamic_quant,
    ),
    NpuOp(
        "npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, "
        "int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, "
        "int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor",
        npu_reference.quant_matmul,
        npu_meta.quant_matmul,
    ),
    NpuOp(
        "npu_format_cast(Tensor input, int acl_format, *, int? customize_dtype=None, "
        "int? input_dtype=None) -> Tensor",
        npu_reference.format_cast,
        npu_meta.format_cast,
    ),
)
"""Every torch_npu call of this tree."""


@functools.cache
def register_npu_ops() -> torch.library.Library:
    """Define the table under ``npu::`` for CPU and Meta tensors: reference mode. Idempotent.

    Returns:
        The registration; it lasts as long as the process.

    Raises:
        ConfigError: torch_npu is loaded, so the real calls exist.
    """
    present = [op.name for op in NPU_OPS if hasattr(torch.ops.npu, op.name)]
    if present:
        raise ConfigError(
            f"npu::{present[0]} is registered already: torch_npu is loaded, so reference mode "
            "cannot be. Unset VLLM_ASCEND_REFERENCE, or run where torch_npu is not installed."
        )
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for op in NPU_OPS:
        library.define(op.schema)  # type: ignore[no-untyped-call]
        library.impl(op.name, op.run, "CPU")  # type: ignore[no-untyped-call]
        library.impl(op.name, op.infer, "Meta")  # type: ignore[no-untyped-call]
    return library
