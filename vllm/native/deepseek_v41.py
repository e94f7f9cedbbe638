"""DeepSeek-V4.1 on the native kernels: the weights, tables and caches of the torch model."""

import ctypes
from collections.abc import Mapping

import torch

from vllm.model_executor.models.deepseek_v4.kv_cache import LayerCacheNames
from vllm.model_executor.models.deepseek_v41.block import DeepseekV41Block
from vllm.model_executor.models.deepseek_v41.engram import Engram
from vllm.model_executor.models.deepseek_v41.entries import SharedEntries
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.native import structs
from vllm.native.deepseek_v4 import bind_block, bind_latent_model
from vllm.native.library import NativeContext
from vllm.native.step_tables import NativeTables
from vllm.native.tensors import TensorBinder, find_packed, make_step
from vllm.v1.attention.metadata import CacheLayout


class NativeDeepseekV41:
    """Runs a loaded model's steps by ``csrc/``.

    Numbers are fp32 whatever the weights' type, but a bf16 model's products round their inputs.

    Args:
        model: The loaded model, which keeps the weights and reads the tables of n-grams.
        layout: The KV groups.
        kv_caches: Cache name -> view; the same in every step.
        context: Threads and scratch.
        releases: Whether weights that are packed are given back; the torch model then has none.
    """

    def __init__(
        self,
        model: DeepseekV41ForCausalLM,
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
            *(self._bind_layer(index) for index in range(len(model.layers)))
        )
        self._struct = self._bind_model()

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the collapsed streams fp32 ``[T, D]``; see ``DeepseekV41ForCausalLM``."""
        del kv_caches  # the structs hold their addresses
        count = len(token_ids)
        stream = torch.empty(count, self._model.config.hidden_size, dtype=torch.float32)
        if count:
            pending = self._model.begin_reads(token_ids, meta.previous)
            rows = self._model.finish_reads(pending, count)
            step = make_step(token_ids, positions, meta)
            self._context.v41_forward(self._struct, step, rows, stream)
        return stream

    def compute_logits(self, stream: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any collapsed rows."""
        stream = stream.contiguous()
        logits = torch.empty(len(stream), self._model.config.vocab_size, dtype=torch.float32)
        self._context.v41_logits(self._struct, stream, logits)
        return logits

    def norm_streams(self, stream: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of collapsed rows: fp32 ``[M, D]``; see the model's."""
        normed: torch.Tensor = self._model.norm_streams(stream)
        return normed

    def _bind_model(self) -> structs.V4Model:
        config = self._model.config
        struct = bind_latent_model(self._model, self._layers, self._binder)
        struct.has_plain_queries = not config.norms_heads
        struct.cut = config.cut
        struct.candidate_blocks = config.candidate_topk_blocks
        struct.candidate_block_size = config.candidate_block_size
        struct.image_token_id = -1 if config.image_token_id is None else config.image_token_id
        return struct

    def _bind_layer(self, index: int) -> structs.V4Layer:
        bind, block = self._binder, self._model.layers[index]
        assert isinstance(block, DeepseekV41Block)
        window = bind.cache(LayerCacheNames.of_block(f"layers.{index}").window)
        struct = bind_block(block, window, bind)
        if isinstance(block.attn.entries, SharedEntries):
            self._bind_entries(index, block.attn.entries, struct)
        if index in self._model.tables:
            engram = self._model.engrams[str(index)]
            assert isinstance(engram, Engram)
            gate = structs.NgramGate(
                wkv=bind.linear(engram.wkv),
                q_weight=bind.vector(engram.q_weight),
                k_weight=bind.vector(engram.k_weight),
                index=list(self._model.tables).index(index),
            )
            struct.ngrams = ctypes.pointer(gate)
        return struct

    def _bind_entries(self, index: int, entries: SharedEntries, struct: structs.V4Layer) -> None:
        bind, config = self._binder, self._model.config
        plan = config.layers[index]
        names = LayerCacheNames.of_block(f"layers.{plan.source}")
        struct.kind, struct.ratio = structs.CHOSEN_ENTRIES, plan.ratio
        struct.compressor = structs.Compressor(
            entries=bind.cache(names.entries), row_width=config.head_dim, width=config.head_dim
        )
        struct.index_compressor = structs.Compressor(
            entries=bind.cache(names.indexer), width=config.index_head_dim
        )
        sharing = structs.V4Sharing(
            chooses=entries.wq_b is not None, candidates=structs.CANDIDATES[plan.candidates]
        )
        if entries.wq_b is not None:
            struct.index_wq_b = bind.linear(entries.wq_b)
        maker = entries.maker
        if maker is not None:
            sharing.makes_entries = 1
            sharing.key_proj = bind.linear(maker.wk)
            sharing.key_norm = bind.vector(maker.k_norm)
            struct.compressor.norm = bind.vector(maker.norm)
            if plan.ratio > 1:
                struct.compressor.state = bind.cache(names.state)
        struct.sharing = ctypes.pointer(sharing)
