"""The ops a model asks the NPU platform for: by torch_npu, or by aten with the reason why."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm.exceptions import ConfigError
from vllm.v1.attention.ops.registry import REFERENCE_OPS, Op
from vllm_ascend.ops import elementwise, experts
from vllm_ascend.ops.pages import A2_A3_PAGES


@dataclass(frozen=True, slots=True)
class AscendOp:
    """How one op of the core's registry runs on an NPU.

    Attributes:
        run: The op, with the reference's signature.
        npu_calls: The torch_npu calls it makes; none: aten.
        note: Limits of the calls, or why aten.
        a5_only: Whether the calls exist on A5 alone; elsewhere the reference runs.
    """

    run: Op
    npu_calls: tuple[str, ...] = ()
    note: str = ""
    a5_only: bool = False


def _aten(name: str, note: str) -> AscendOp:
    return AscendOp(REFERENCE_OPS[name], (), note)


ASCEND_OPS: Mapping[str, AscendOp] = MappingProxyType(
    {
        "linear": _aten("linear", "a plain product; w8a8 layers call npu_quant_matmul instead"),
        "grouped_linear": _aten("grouped_linear", "a batched product"),
        "rms_norm": AscendOp(
            elementwise.rms_norm, ("npu_rms_norm",), "gamma in the input's type; ones for no weight"
        ),
        "rotate_": AscendOp(
            elementwise.rotate_, ("npu_rotary_mul",), "interleave, [S, 1, N, D], in fp32"
        ),
        "hc_project": _aten(
            "hc_project",
            "npu_mhc_pre fuses it with the gates, is documented for A5 alone and does not say "
            "whether its h_post is doubled",
        ),
        "sinkhorn": _aten(
            "sinkhorn",
            "npu_mhc_sinkhorn is documented for A5 alone and says neither where eps is added nor "
            "whether a softmax comes first",
        ),
        "hc_collapse": _aten("hc_collapse", "a weighted sum; part of npu_mhc_pre, see hc_project"),
        "hc_expand": AscendOp(
            elementwise.hc_expand, ("npu_mhc_post",), "fp16 or bf16 and 4, 6 or 8 streams", True
        ),
        "write_rows": AscendOp(
            A2_A3_PAGES.write_rows,
            ("npu_scatter_nd_update_",),
            "[block, row] indices; int8 quantises; a V4 on an A5 has page ops of its own",
        ),
        "read_rows": AscendOp(
            A2_A3_PAGES.read_rows, (), "index_select; int8 rows are dequantised; A5: as above"
        ),
        "round_rows": AscendOp(
            A2_A3_PAGES.round_rows, (), "what write_rows and read_rows make of a row"
        ),
        "compress_windows": _aten("compress_windows", "the wheel has no compressor"),
        "index_scores": _aten(
            "index_scores",
            "npu_lightning_indexer returns choices, not scores, and leaves ties open",
        ),
        "select_entries": _aten("select_entries", "top-k whose ties go to the earliest entry"),
        "list_entries": _aten("list_entries", "the places of a mask's ones"),
        "attend": _aten(
            "attend", "the wheel has no attention over one shared key/value with chosen entries"
        ),
        "router_scores": _aten(
            "router_scores",
            "npu_moe_gating_top_k documents softmax and sigmoid, not sqrt(softplus)",
        ),
        "choose_experts": _aten("choose_experts", "top-k, see router_scores"),
        "expert_weights": _aten("expert_weights", "a gather and a sum, see router_scores"),
        "mix_experts": AscendOp(
            experts.mix_experts,
            (
                "npu_moe_init_routing_v2",
                "npu_grouped_matmul",
                "npu_clipped_swiglu",
                "npu_moe_token_unpermute",
            ),
            "weights are applied after the second product, the reference applies them before",
        ),
        # Decoders with grouped-query attention run in reference mode; nothing is gained by a fused
        # call that nobody has compared with the reference on a device.
        "rms_norm_offset": _aten("rms_norm_offset", "npu_rms_norm has no 1 + gamma"),
        "rotate_halves": _aten("rotate_halves", "npu_rotary_mul in half mode, not compared yet"),
        "silu_and_mul": _aten("silu_and_mul", "npu_swiglu, not compared yet"),
        "gelu_tanh_and_mul": _aten("gelu_tanh_and_mul", "npu_geglu, not compared yet"),
        "clamped_glu_and_mul": _aten("clamped_glu_and_mul", "no call adds one to the clamped half"),
        "soft_cap_": _aten("soft_cap_", "a tanh"),
        "project_to_logits": _aten("project_to_logits", "a plain product in fp32"),
        "attend_keys": _aten("attend_keys", "npu_fused_infer_attention_score, not compared yet"),
        "join_attention": _aten("join_attention", "sums over parts of a context"),
        "weigh_sinks": _aten("weigh_sinks", "one extra logit a head"),
        "router_logits": _aten("router_logits", "a plain product in fp32"),
        "choose_by_softmax": _aten("choose_by_softmax", "npu_moe_gating_top_k, not compared yet"),
        "choose_by_sigmoid": _aten("choose_by_sigmoid", "npu_moe_gating_top_k, not compared yet"),
        "run_experts": _aten("run_experts", "as mix_experts, without a shared expert"),
        "gated_mlp": _aten("gated_mlp", "two products and a gate"),
        "short_convolution": _aten("short_convolution", "npu_causal_conv1d, not compared yet"),
        "causal_convolution": _aten("causal_convolution", "LFM2 alone asks, on a CPU"),
        "decay_logs": _aten("decay_logs", "a softplus in fp32"),
        "bounded_decay_logs": _aten("bounded_decay_logs", "a sigmoid under a bound"),
        "limited_silu_and_mul": _aten("limited_silu_and_mul", "limits before a gated product"),
        "gated_delta_scan": _aten("gated_delta_scan", "calls for it compute by chunks of tokens"),
        "gated_rms_norm": _aten("gated_rms_norm", "npu_rms_norm has no gate"),
        "gate_heads": _aten("gate_heads", "a sigmoid"),
        "stored_linear": _aten(
            "stored_linear", "npu_weight_quant_batchmatmul knows other layouts, not compared yet"
        ),
        "stored_grouped_linear": _aten("stored_grouped_linear", "likewise"),
        "read_stored_rows": _aten("read_stored_rows", "rows of a table, decoded"),
    }
)
"""Every name of the core's registry, once."""


def get_ascend_op(name: str, *, is_a5: bool = False, uses_triton: bool = False) -> Op:
    """Return an op for tensors on an NPU, or in reference mode on a CPU.

    Args:
        name: A name of the core's registry.
        is_a5: Whether the device is an A5 (Ascend 950), which has calls of its own.
        uses_triton: Whether the core's Triton kernels stand in for plain torch; npu calls go first.

    Raises:
        ConfigError: No op has this name.
    """
    op = ASCEND_OPS.get(name)
    if op is None:
        raise ConfigError(f"no op is named {name!r}; known: {', '.join(sorted(ASCEND_OPS))}")
    run = REFERENCE_OPS[name] if op.a5_only and not is_a5 else op.run
    if uses_triton and run is REFERENCE_OPS[name]:
        from vllm.v1.attention.ops.triton.registry import (  # noqa: PLC0415  (loads triton)
            get_triton_op,
        )

        return get_triton_op(name)
    return run
