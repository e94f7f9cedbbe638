"""Decoders of grouped-query attention on the native kernels."""

from collections.abc import Mapping
from ctypes import c_void_p, pointer
from typing import Any

import torch

from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.models.decoder.attention import DecoderAttention
from vllm.model_executor.models.decoder.clamped_experts import (
    ClampedExperts,
    MxFp4Stack,
    PackedStack,
    Stack,
)
from vllm.model_executor.models.decoder.config import LayerPlan, MlpPlan
from vllm.model_executor.models.decoder.experts_beside import ExpertsBeside
from vllm.model_executor.models.decoder.feed_forward import ExpertBank, Experts, GatedMlp
from vllm.model_executor.models.decoder.kv_cache import cache_name
from vllm.model_executor.models.decoder.layer_inputs import LayerInputs
from vllm.model_executor.models.decoder.model import DecoderBlock, DecoderForCausalLM
from vllm.model_executor.models.decoder.step import find_frequencies
from vllm.native import structs
from vllm.native.library import NativeContext
from vllm.native.step_tables import NativeTables
from vllm.native.tensors import TensorBinder, can_read_rows, can_read_tensors, make_step
from vllm.v1.attention.metadata import CacheLayout

_ACTIVATIONS = {"silu": structs.SILU, "gelu_tanh": structs.GELU_TANH}


class NativeDecoder:
    """Runs a loaded decoder's steps by ``csrc/``; numbers are fp32 whatever the weights' type.

    Args:
        model: The loaded model, which keeps the weights.
        layout: The KV groups.
        kv_caches: Cache name -> view; the same in every step.
        context: Threads and scratch.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        context: NativeContext,
    ) -> None:
        self._model, self._context = model, context
        self._binder = TensorBinder(layout, kv_caches)
        config, bind = model.config, self._binder
        self._beside: list[structs.ExpertsBeside] = []
        self._layers = (structs.DecoderLayer * len(model.layers))(
            *(
                self._bind_layer(index, plan, block)
                for index, (plan, block) in enumerate(zip(config.layers, model.layers, strict=True))
                if isinstance(block, DecoderBlock)
            )
        )
        self._struct = structs.DecoderModel(
            embed=bind.source(model.embed.find_rows()),
            head=bind.source(model.head_rows()),
            norm=self._norm(model.norm),
            layers=self._layers,
            num_layers=len(self._layers),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            last_owner=config.last_owner,
            embedding_scale=model.embedding_scale,
            final_soft_cap=config.final_soft_cap,
            norm_eps=config.norm.eps,
        )
        if model.layer_inputs is not None:
            self._bind_layer_inputs(model.layer_inputs)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the residual stream fp32 ``[T, D]``; see ``DecoderForCausalLM``."""
        del kv_caches  # the structs hold their addresses
        stream = torch.empty(len(token_ids), self._model.config.hidden_size, dtype=torch.float32)
        if len(token_ids):
            step = make_step(token_ids, positions, meta)
            self._context.decoder_forward(self._struct, step, stream)
        return stream

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any rows of the stream."""
        streams = streams.contiguous()
        logits = torch.empty(len(streams), self._model.config.vocab_size, dtype=torch.float32)
        self._context.decoder_logits(self._struct, streams, logits)
        return logits

    def _norm(self, weight: torch.Tensor) -> int:
        wide = weight.detach().float()
        return self._binder.vector(wide + 1 if self._model.config.norm.has_offset else wide)

    def _vector(self, values: torch.Tensor | None) -> int | None:
        return None if values is None else self._binder.vector(values)

    def _bind_layer(self, index: int, plan: LayerPlan, block: DecoderBlock) -> structs.DecoderLayer:
        norms = [self._norm(weight) for weight in block.norms]
        if len(norms) == 2:
            in_order: list[int | None] = [norms[0], None, norms[1], None]
        else:
            in_order = [*norms]
        layer = structs.DecoderLayer(
            norms=(c_void_p * 4)(*in_order),
            cache=self._binder.cache(cache_name(index if plan.kv_owner is None else plan.kv_owner)),
            window=plan.window,
            scalar=1.0 if block.scalar is None else float(block.scalar),
        )
        self._bind_heads(layer, index, plan)
        if plan.rope is not None:
            layer.frequencies = self._binder.vector(
                find_frequencies(plan.rope, torch.device("cpu"))
            )
            layer.magnitude = plan.rope.magnitude
        assert isinstance(block.attention, DecoderAttention), "can_run_decoder looked"
        self._bind_attention(layer, block.attention)
        self._bind_feed_forward(layer, plan, block.feed_forward)
        if block.experts is not None:
            layer.beside = self._bind_beside(block.experts)
        if block.layer_input is not None:
            layer.input_gate = self._binder.linear(block.layer_input.gate)
            layer.input_output = self._binder.linear(block.layer_input.output)
            layer.input_norm = self._binder.vector(block.layer_input.norm)
        return layer

    def _bind_heads(self, layer: structs.DecoderLayer, index: int, plan: LayerPlan) -> None:
        config = self._model.config
        shape, owner = config.shape_of(plan), index if plan.kv_owner is None else plan.kv_owner
        layer.num_heads, layer.num_kv_heads = shape.num_heads, shape.num_kv_heads
        layer.head_dim, layer.scale, layer.soft_cap = shape.head_dim, shape.scale, shape.soft_cap
        layer.has_own_rows, layer.has_value_norm = plan.kv_owner is None, shape.has_value_norm
        shared = sorted(config.shared_owners)
        layer.shared_slot = shared.index(owner) + 1 if owner in shared else 0

    def _bind_beside(self, module: ExpertsBeside) -> Any:
        bound = structs.ExpertsBeside(
            norms=(c_void_p * 3)(*(self._binder.vector(weight) for weight in module.norms)),
            router_norm=self._binder.vector(module.router_norm()),
            expert_scales=self._binder.vector(module.expert_scales),
            router=self._binder.matrix(module.router),
            num_experts=module.plan.num_experts,
            num_chosen=module.plan.num_chosen,
            inner=module.plan.inner_size,
        )
        bound.gate_up, bound.down = self._bind_experts(module)
        self._beside.append(bound)
        return pointer(bound)

    def _bind_layer_inputs(self, module: LayerInputs) -> None:
        own, bind = self._struct, self._binder
        own.input_table = bind.matrix(module.table.rows)
        own.input_projection = bind.linear(module.projection)
        own.input_norm, own.input_width = bind.vector(module.norm), len(module.norm)
        own.input_table_scale = module.table_scale
        own.input_projection_scale = module.projection_scale

    def _bind_experts(self, module: ExpertBank) -> tuple[structs.Matrix, structs.Matrix]:
        bind = self._binder
        if not module.stored:
            return bind.matrix(module.gate_up), bind.matrix(module.down)
        gate_up = [rows for own in module.stored for rows in (own.gate, own.up)]
        return (
            bind.stack([matrix.row_source for matrix in gate_up]),
            bind.stack([own.down.row_source for own in module.stored]),
        )

    def _bind_attention(self, layer: structs.DecoderLayer, attention: DecoderAttention) -> None:
        layer.qkv = self._binder.linear(attention.qkv)
        layer.output = self._binder.linear(attention.output)
        layer.qkv_bias = self._vector(attention.qkv_bias)
        layer.output_bias = self._vector(attention.output_bias)
        layer.sinks = self._vector(attention.sinks)
        if attention.qk_norm is not None:
            norms = [self._norm(weight) for weight in attention.qk_norm]
            layer.q_norm, layer.k_norm = norms[0], norms[-1]

    def _bind_feed_forward(
        self,
        layer: structs.DecoderLayer,
        plan: LayerPlan,
        module: GatedMlp | Experts | ClampedExperts,
    ) -> None:
        bind, own = self._binder, plan.feed_forward
        layer.inner = own.inner_size
        if isinstance(module, GatedMlp):
            assert isinstance(own, MlpPlan)
            layer.feed_forward, layer.activation = structs.MLP, _ACTIVATIONS[own.activation]
            layer.gate_up = bind.linear(module.gate_up)
            layer.down = bind.linear(module.down)
            layer.gate_up_bias = self._vector(module.gate_up_bias)
            layer.down_bias = self._vector(module.down_bias)
            return
        layer.feed_forward, layer.router = structs.EXPERTS, bind.matrix(module.router)
        layer.num_experts, layer.num_chosen = module.plan.num_experts, module.plan.num_chosen
        if isinstance(module, Experts):
            layer.activation = _ACTIVATIONS[module.plan.activation]
            layer.normalises = module.plan.normalises
            layer.gate_up, layer.down = self._bind_experts(module)
            return
        layer.activation, layer.normalises = structs.CLAMPED, True
        layer.alpha, layer.limit = module.plan.alpha, module.plan.limit
        layer.router_bias = bind.vector(module.router_bias)
        layer.gate_up_bias = bind.vector(module.gate_up_bias)
        layer.down_bias = bind.vector(module.down_bias)
        layer.gate_up = self._bind_stack(module.gate_up)
        layer.down = self._bind_stack(module.down)

    def _bind_stack(self, stack: Stack) -> structs.Matrix:
        if isinstance(stack, PackedStack):
            return self._binder.stack([matrix.row_source for matrix in stack.matrices])
        if isinstance(stack, MxFp4Stack):
            return self._binder.mxfp4_matrix(stack.codes, stack.scales)
        return self._binder.matrix(stack.weight)


def can_run_decoder(model: DecoderForCausalLM, kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the kernels take this model's weights and caches."""
    if model.config.recurrences or model.config.attention.has_output_gate:
        return False
    if len(model.config.shared_owners) > structs.MAX_SHARED_OWNERS:
        return False
    sources = [model.embed.find_rows(), model.head_rows()]
    for module in model.modules():
        if isinstance(module, PackedStack):
            sources += [matrix.row_source for matrix in module.matrices]
        if isinstance(module, ExpertBank):
            for own in module.stored:
                sources += [own.gate.row_source, own.up.row_source, own.down.row_source]
    if model.layer_inputs is not None:
        sources.append(PlainRows(model.layer_inputs.table.rows))
    return can_read_tensors(model, kv_caches) and all(can_read_rows(rows) for rows in sources)
