"""The names a model asks its platform's ops by, with the plain-torch op of each.

A platform's ``get_op`` returns its own kernel for the names it speeds up and the reference for
the rest. Signatures are those of ``reference``, ``decoder``, ``recurrent`` and
``stored_products``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from vllm.exceptions import ConfigError
from vllm.v1.attention.ops import decoder, recurrent, reference, stored_products

Op = Callable[..., Any]
OpResolver = Callable[[str], Op]

REFERENCE_OPS: Mapping[str, Op] = MappingProxyType(
    {
        op.__name__: op
        for op in (
            reference.linear,
            reference.grouped_linear,
            reference.rms_norm,
            reference.rotate_,
            reference.hc_project,
            reference.sinkhorn,
            reference.hc_collapse,
            reference.hc_expand,
            reference.write_rows,
            reference.read_rows,
            reference.round_rows,
            reference.compress_windows,
            reference.index_scores,
            reference.select_entries,
            reference.list_entries,
            reference.attend,
            reference.router_scores,
            reference.choose_experts,
            reference.expert_weights,
            reference.mix_experts,
            decoder.rms_norm_offset,
            decoder.rotate_halves,
            decoder.silu_and_mul,
            decoder.limited_silu_and_mul,
            decoder.gelu_tanh_and_mul,
            decoder.clamped_glu_and_mul,
            decoder.soft_cap_,
            decoder.project_to_logits,
            decoder.attend_keys,
            decoder.join_attention,
            decoder.weigh_sinks,
            decoder.router_logits,
            decoder.choose_by_softmax,
            decoder.choose_by_sigmoid,
            decoder.run_experts,
            decoder.gated_mlp,
            recurrent.short_convolution,
            recurrent.causal_convolution,
            recurrent.decay_logs,
            recurrent.bounded_decay_logs,
            recurrent.gated_delta_scan,
            recurrent.gated_rms_norm,
            recurrent.gate_heads,
            stored_products.stored_linear,
            stored_products.stored_grouped_linear,
            stored_products.read_stored_rows,
        )
    }
)


def get_reference_op(name: str) -> Op:
    """Returns the plain-torch op of a name; an ``OpResolver``.

    Raises:
        ConfigError: No op has this name.
    """
    op = REFERENCE_OPS.get(name)
    if op is None:
        raise ConfigError(f"no op is named {name!r}; known: {', '.join(sorted(REFERENCE_OPS))}")
    return op
