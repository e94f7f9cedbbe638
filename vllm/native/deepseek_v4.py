"""DeepSeek-V4 on the native kernels: the weights and caches of the torch model, other code."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm.model_executor.layers.quantization.storages import StackedRows
from vllm.model_executor.layers.quantization.stored_matrix import StoredExperts
from vllm.model_executor.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.model_executor.models.deepseek_v4.block import DeepseekV4Block
from vllm.model_executor.models.deepseek_v4.compressor import Compressor as TorchCompressor
from vllm.model_executor.models.deepseek_v4.entries import AllEntries, ChosenEntries
from vllm.model_executor.models.deepseek_v4.kv_cache import MTP_WINDOW, LayerCacheNames
from vllm.model_executor.models.deepseek_v4.latent_model import LatentModel
from vllm.model_executor.models.deepseek_v4.model import DeepseekV4ForCausalLM
from vllm.model_executor.models.deepseek_v4.moe import DeepseekV4MoE
from vllm.model_executor.models.deepseek_v41.block import DeepseekV41Block
from vllm.native import structs
from vllm.native.library import NativeContext
from vllm.native.step_tables import NativeTables
from vllm.native.tensors import (
    MAX_STREAMS,
    TensorBinder,
    can_read_rows,
    can_read_tensors,
    find_packed,
    make_step,
)
from vllm.v1.attention.metadata import CacheLayout


class NativeDeepseekV4:
    """Runs a loaded model's steps by ``csrc/``.

    Numbers are fp32 whatever the weights' type, but a bf16 model's products round their inputs.

    Args:
        model: The loaded model, which keeps the weights.
        layout: The KV groups.
        kv_caches: Cache name -> view; the same in every step.
        context: Threads and scratch.
        releases: Whether weights that are packed are given back; the torch model then has none.
    """

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        context: NativeContext,
        *,
        releases: bool = False,
    ) -> None:
        self._model = model
        self._context = context
        self._binder = TensorBinder(layout, kv_caches, find_packed(model, releases=releases))
        self._layers = (structs.V4Layer * len(model.layers))(
            *(
                _LayerBinder(block, f"layers.{index}", self._binder).bind()
                for index, block in enumerate(model.layers)
                if isinstance(block, DeepseekV4Block)
            )
        )
        self._struct = self._bind_model()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the residual streams fp32 ``[T, n, D]``; see ``DeepseekV4ForCausalLM``."""
        del kv_caches  # the structs hold their addresses
        config = self._model.config
        streams = torch.empty(
            len(token_ids), config.hc_mult, config.hidden_size, dtype=torch.float32
        )
        if len(token_ids):
            self._context.v4_forward(self._struct, make_step(token_ids, positions, meta), streams)
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any rows of streams."""
        return self._compute_logits(streams, is_mtp=False)

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of rows of streams: fp32 ``[M, D]``; see the model's."""
        normed: torch.Tensor = self._model.norm_streams(streams)
        return normed

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the MTP block's streams ``[T, n, D]``; ``meta`` lists its group alone."""
        del kv_caches
        streams = streams.contiguous()
        output = torch.empty_like(streams)
        if len(positions):
            step = make_step(next_token_ids, positions, meta)
            self._context.v4_forward_mtp(self._struct, step, streams, output)
        return output

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of the MTP block's streams."""
        return self._compute_logits(streams, is_mtp=True)

    def _compute_logits(self, streams: torch.Tensor, *, is_mtp: bool) -> torch.Tensor:
        streams = streams.contiguous()
        logits = torch.empty(len(streams), self._model.config.vocab_size, dtype=torch.float32)
        self._context.v4_logits(self._struct, streams, logits, is_mtp=is_mtp)
        return logits

    def _bind_model(self) -> structs.V4Model:
        model, bind = self._model, self._binder
        struct = bind_latent_model(model, self._layers, bind)
        struct.head_hyper = bind.hyper(model.hc_head)
        mtp = model.mtp
        if mtp is not None and MTP_WINDOW in bind.kv_caches:
            block = _LayerBinder(mtp.block, "mtp.0", bind, group=0).bind()
            struct.mtp = ctypes.pointer(block)
            struct.mtp_e_proj = bind.linear(mtp.e_proj)
            struct.mtp_h_proj = bind.linear(mtp.h_proj)
            struct.mtp_enorm = bind.vector(mtp.enorm)
            struct.mtp_hnorm = bind.vector(mtp.hnorm)
            struct.mtp_norm = bind.vector(mtp.norm)
            struct.mtp_head_hyper = bind.hyper(mtp.hc_head)
        return struct


def bind_latent_model(
    model: LatentModel[Any], layers: "ctypes.Array[structs.V4Layer]", bind: TensorBinder
) -> structs.V4Model:
    """Returns the struct of a model whose layers are bound, but for what one architecture has."""
    config = model.config
    head = bind.source(model.head.find_rows())
    return structs.V4Model(
        embed=bind.embedding(model.embed),
        head=head,
        norm=bind.vector(model.norm),
        layers=layers,
        main_frequencies=bind.vector(model.frequencies.main),
        compress_frequencies=bind.vector(model.frequencies.compress),
        num_layers=len(layers),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_streams=config.hc_mult,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        window=config.sliding_window,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        num_experts=config.n_routed_experts,
        num_chosen=config.num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        sinkhorn_iterations=config.hc_sinkhorn_iters,
        routed_scale=config.routed_scaling_factor,
        swiglu_limit=config.swiglu_limit,
        hyper_eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
    )


def can_run_latent_model(model: LatentModel[Any], kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the kernels take the weights and caches of a DeepSeek-V4 or V4.1."""
    layers = [module for module in model.modules() if isinstance(module, DeepseekV4MoE)]
    return (
        can_read_tensors(model, kv_caches)
        and all(
            layer.quantised is None or isinstance(layer.quantised, StoredExperts)
            for layer in layers
        )
        and can_read_rows(model.embed.find_rows())
        and can_read_rows(model.head.find_rows())
        and model.config.hc_mult <= MAX_STREAMS
    )


def bind_block(
    block: DeepseekV4Block | DeepseekV41Block, window: structs.Cache, bind: TensorBinder
) -> structs.V4Layer:
    """Returns the struct of a block that attends to its window alone."""
    attention, experts = block.attn, block.ffn
    struct = structs.V4Layer(
        kind=structs.WINDOW,
        attn_hyper=bind.hyper(block.attn_hc),
        ffn_hyper=bind.hyper(block.ffn_hc),
        attn_norm=bind.vector(block.attn_norm),
        ffn_norm=bind.vector(block.ffn_norm),
        in_proj=bind.linear(attention.in_proj),
        q_norm=bind.vector(attention.q_norm),
        kv_norm=bind.vector(attention.kv_norm),
        wq_b=bind.linear(attention.wq_b),
        wo_a=bind.linear(attention.wo_a),
        wo_b=bind.linear(attention.wo_b),
        sinks=bind.vector(attention.sinks),
        window=window,
        router=bind.matrix(experts.gate),
        gate_up=_bind_gate_up(experts, bind),
        down=_bind_down(experts, bind),
    )
    if experts.bias is not None:
        struct.router_bias = bind.vector(experts.bias)
    if experts.expert_of_token is not None:
        struct.expert_of_token = experts.expert_of_token.data_ptr()
    return struct


def _bind_gate_up(experts: DeepseekV4MoE, bind: TensorBinder) -> structs.Matrix:
    stored = experts.quantised
    if not isinstance(stored, StoredExperts):
        return bind.matrix(experts.gate_up)
    parts = [part for expert in stored.experts for part in (expert.gate, expert.up)]
    return bind.rows(StackedRows(*parts))


def _bind_down(experts: DeepseekV4MoE, bind: TensorBinder) -> structs.Matrix:
    stored = experts.quantised
    if not isinstance(stored, StoredExperts):
        return bind.matrix(experts.down)
    return bind.rows(StackedRows(*(expert.down for expert in stored.experts)))


@dataclass(frozen=True, slots=True)
class _LayerBinder:
    """Makes one block's struct.

    Attributes:
        block: The block.
        prefix: Published prefix of its caches.
        binder: Makes the structs.
        group: The KV group that addresses its caches, if not their own.
    """

    block: DeepseekV4Block
    prefix: str
    binder: TensorBinder
    group: int | None = None

    def bind(self) -> structs.V4Layer:
        window = self.binder.cache(self._names.window, self.group)
        struct = bind_block(self.block, window, self.binder)
        self._bind_entries(self.block.attn, struct)
        return struct

    @property
    def _names(self) -> LayerCacheNames:
        return LayerCacheNames.of_block(self.prefix)

    def _bind_entries(self, attention: DeepseekV4Attention, struct: structs.V4Layer) -> None:
        entries, names = attention.entries, self._names
        if isinstance(entries, ChosenEntries):
            struct.kind, struct.overlap = structs.CHOSEN_ENTRIES, 1
            struct.index_wq_b = self.binder.linear(entries.wq_b)
            struct.index_compressor = self._bind_compressor(
                entries.index_compressor, names.indexer_state, names.indexer
            )
            entries = entries.all_entries
        if isinstance(entries, AllEntries):
            struct.kind = struct.kind or structs.ALL_ENTRIES
            struct.ratio = entries.compressor.ape.shape[0]
            struct.compressor = self._bind_compressor(
                entries.compressor, names.state, names.entries
            )

    def _bind_compressor(
        self, compressor: TorchCompressor, state: str, entries: str
    ) -> structs.Compressor:
        bind = self.binder
        return structs.Compressor(
            ape=bind.vector(compressor.ape),
            norm=bind.vector(compressor.norm),
            state=bind.cache(state, self.group),
            entries=bind.cache(entries, self.group),
            row_width=compressor.row_width,
            width=compressor.norm.shape[0],
        )
