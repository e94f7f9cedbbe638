"""The ops a model asks a GPU's platform for: by Triton, or by torch with the reason why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from vllm import envs
from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import decoder, reference
from vllm.v1.attention.ops.registry import REFERENCE_OPS, Op
from vllm.v1.attention.ops.stored import GatedExperts, RowSource, StoredStack
from vllm.v1.attention.ops.triton import (
    attention,
    elementwise,
    experts,
    hyper_connections,
    indexer,
    pages,
    products,
    recurrent,
    stored_products,
)


@dataclass(frozen=True, slots=True)
class TritonOp:
    """How one op of the registry runs on a GPU.

    Attributes:
        run: The op, with the reference's signature.
        invariant: What runs instead where bits must not depend on the batch; None: the same.
        note: Why torch, where it is torch.
    """

    run: Op
    invariant: Op | None = None
    note: str = ""


def _torch(name: str, note: str, invariant: Op | None = None) -> TritonOp:
    return TritonOp(REFERENCE_OPS[name], invariant, note)


def run_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    run_expert: Callable[[torch.Tensor, int], torch.Tensor],
    stacks: GatedExperts | None = None,
) -> torch.Tensor:
    """See ``decoder.run_experts``; without stacks the experts run one by one."""
    if stacks is None:
        return decoder.run_experts(x, expert_ids, weights, run_expert)
    is_invariant = envs.VLLM_BATCH_INVARIANT
    return experts.mix_gated_experts(x, expert_ids, weights, stacks, is_invariant=is_invariant)


def mix_experts(*arguments: Any) -> torch.Tensor:
    """See ``reference.mix_experts``."""
    return experts.mix_experts(*arguments, is_invariant=envs.VLLM_BATCH_INVARIANT)


def stored_linear(x: torch.Tensor, source: RowSource) -> torch.Tensor:
    """See ``stored_products.stored_linear``."""
    return stored_products.stored_linear(x, source, is_invariant=envs.VLLM_BATCH_INVARIANT)


def stored_grouped_linear(x: torch.Tensor, source: RowSource, num_groups: int) -> torch.Tensor:
    """See ``stored_products.stored_grouped_linear``."""
    return stored_products.stored_grouped_linear(
        x, source, num_groups, is_invariant=envs.VLLM_BATCH_INVARIANT
    )


def project_to_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See ``decoder.project_to_logits``: narrow weights, fp32 sums and fp32 logits."""
    if weight.dtype == torch.float32:
        return reference.linear(x.float(), weight)
    if x.is_cuda:
        return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    return project_in_order(x, weight)


def project_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``project_to_logits`` whose sums have one order in any batch."""
    stack = StoredStack.plain(weight.unsqueeze(0))
    out = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
    return products.stack_linear(x.to(weight.dtype), stack, out=out)


def router_logits_in_order(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``decoder.router_logits`` likewise."""
    logits = products.linear_in_order(x.float(), weight)
    return logits if bias is None else logits + bias


def gated_mlp_in_order(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """``decoder.gated_mlp`` likewise."""
    return products.linear_in_order(activate(products.linear_in_order(x, gate_up)), down)


TRITON_OPS: Mapping[str, TritonOp] = MappingProxyType(
    {
        "linear": _torch("linear", "cuBLAS", products.linear_in_order),
        "grouped_linear": _torch(
            "grouped_linear", "cuBLAS, batched", products.grouped_linear_in_order
        ),
        "gated_mlp": _torch("gated_mlp", "cuBLAS around a kernel", gated_mlp_in_order),
        "router_logits": _torch("router_logits", "cuBLAS", router_logits_in_order),
        "project_to_logits": TritonOp(
            project_to_logits, project_in_order, "cuBLAS with fp32 logits"
        ),
        "stored_linear": TritonOp(stored_linear),
        "stored_grouped_linear": TritonOp(stored_grouped_linear),
        "read_stored_rows": TritonOp(stored_products.read_stored_rows),
        "rms_norm": TritonOp(elementwise.rms_norm),
        "rms_norm_offset": TritonOp(elementwise.rms_norm_offset),
        "rotate_": TritonOp(elementwise.rotate_),
        "rotate_halves": TritonOp(elementwise.rotate_halves),
        "silu_and_mul": TritonOp(elementwise.silu_and_mul),
        "gelu_tanh_and_mul": TritonOp(elementwise.gelu_tanh_and_mul),
        "clamped_glu_and_mul": TritonOp(elementwise.clamped_glu_and_mul),
        "soft_cap_": TritonOp(elementwise.soft_cap_),
        "hc_project": TritonOp(hyper_connections.hc_project),
        "sinkhorn": TritonOp(hyper_connections.sinkhorn),
        "hc_collapse": TritonOp(hyper_connections.hc_collapse),
        "hc_expand": TritonOp(hyper_connections.hc_expand),
        "write_rows": TritonOp(pages.write_rows),
        "read_rows": TritonOp(pages.read_rows),
        "round_rows": _torch("round_rows", "two conversions, or none"),
        "compress_windows": TritonOp(indexer.compress_windows),
        "index_scores": TritonOp(indexer.index_scores),
        "select_entries": TritonOp(indexer.select_entries),
        "list_entries": TritonOp(
            indexer.list_entries, note="torch: a running sum and one write of each place"
        ),
        "attend": TritonOp(attention.attend),
        "attend_keys": TritonOp(attention.attend_keys),
        "join_attention": _torch("join_attention", "only where a chunk is not read from pages"),
        "weigh_sinks": _torch("weigh_sinks", "likewise"),
        "router_scores": TritonOp(experts.router_scores),
        "choose_experts": TritonOp(experts.choose_experts),
        "choose_by_softmax": TritonOp(experts.choose_by_softmax),
        "choose_by_sigmoid": _torch("choose_by_sigmoid", "E values a token"),
        "expert_weights": _torch("expert_weights", "k values a token"),
        "mix_experts": TritonOp(mix_experts),
        "run_experts": TritonOp(run_experts),
        "causal_convolution": _torch("causal_convolution", "LFM2 alone asks, on a CPU"),
        "short_convolution": TritonOp(recurrent.short_convolution),
        "bounded_decay_logs": TritonOp(recurrent.bounded_decay_logs),
        "limited_silu_and_mul": TritonOp(elementwise.clamped_silu_and_mul),
        "decay_logs": TritonOp(recurrent.decay_logs),
        "gated_delta_scan": TritonOp(recurrent.gated_delta_scan),
        "gated_rms_norm": TritonOp(recurrent.gated_rms_norm),
        "gate_heads": TritonOp(recurrent.gate_heads),
    }
)
"""Every name of the core's registry, once."""


def get_triton_op(name: str) -> Op:
    """Return an op for tensors on a GPU, or on a CPU where kernels are interpreted.

    Raises:
        ConfigError: No op has this name.
    """
    op = TRITON_OPS.get(name)
    if op is None:
        raise ConfigError(f"no op is named {name!r}; known: {', '.join(sorted(TRITON_OPS))}")
    if op.invariant is not None and envs.VLLM_BATCH_INVARIANT:
        return op.invariant
    return op.run
