"""Decoders of grouped-query attention on the native kernels."""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import addressof, c_int32, c_void_p, pointer
from typing import Any

import torch

from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.models.decoder.attention import DecoderAttention
from vllm.model_executor.models.decoder.channel_decays import ChannelDecayNet
from vllm.model_executor.models.decoder.clamped_experts import (
    ClampedExperts,
    MxFp4Stack,
    PackedStack,
    Stack,
)
from vllm.model_executor.models.decoder.config import ExpertsPlan, LayerPlan, MlpPlan
from vllm.model_executor.models.decoder.experts_beside import ExpertsBeside
from vllm.model_executor.models.decoder.feed_forward import (
    ExpertBank,
    GatedMlp,
    SharedExperts,
    SigmoidExperts,
)
from vllm.model_executor.models.decoder.gated_delta import GatedDeltaNet
from vllm.model_executor.models.decoder.indexed_attention import IndexedAttention
from vllm.model_executor.models.decoder.kv_cache import (
    STATES,
    cache_name,
    drafter_cache_names,
    pool_keys_name,
    pool_state_name,
)
from vllm.model_executor.models.decoder.latent_attention import LatentAttention
from vllm.model_executor.models.decoder.layer_inputs import LayerInputs
from vllm.model_executor.models.decoder.model import (
    DecoderBlock,
    DecoderDrafter,
    DecoderForCausalLM,
)
from vllm.model_executor.models.decoder.pool_keys import PoolKeys
from vllm.model_executor.models.decoder.recurrence import RecurrentNet
from vllm.model_executor.models.decoder.rope_config import RopeConfig
from vllm.model_executor.models.decoder.short_convolution import ShortConvolution
from vllm.model_executor.models.decoder.step import find_frequencies
from vllm.native import structs
from vllm.native.library import NativeContext
from vllm.native.step_tables import NativeTables, build_settled_tables
from vllm.native.tensors import (
    MAX_STREAMS,
    TensorBinder,
    can_read_rows,
    can_read_tensors,
    find_packed,
    make_step,
    put_pictures,
)
from vllm.v1.attention.metadata import CacheLayout, RequestSlice
from vllm.v1.attention.step_pictures import StepPictures

_ACTIVATIONS = {"silu": structs.SILU, "gelu_tanh": structs.GELU_TANH}


class NativeDecoder:
    """Runs a loaded decoder's steps by ``csrc/``.

    Numbers are fp32 whatever the weights' type, but a bf16 model's products round their inputs.

    Owns: what the last step's drafts would do to recurrent states, until they are settled.

    Args:
        model: The loaded model, which keeps the weights.
        layout: The KV groups.
        kv_caches: Cache name -> view; the same in every step.
        context: Threads and scratch.
        releases: Whether weights that are packed are given back; the torch model then has none.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        context: NativeContext,
        *,
        releases: bool = False,
    ) -> None:
        self._model, self._context, self._layout = model, context, layout
        self._binder = TensorBinder(layout, kv_caches, find_packed(model, releases=releases))
        config, bind = model.config, self._binder
        # Structs that others point to.
        self._parts: list[ctypes.Structure] = []
        # Layers that turn alike share what they turn by: a step makes it once for all of them.
        self._frequencies: dict[RopeConfig, int] = {}
        self._axes: dict[RopeConfig, ctypes.Array[c_int32]] = {}
        # By layer; others may attend to what one chooses.
        self._indexers: dict[int, Any] = {}
        self._drafts: torch.Tensor | None = None
        # The block that drafts has tables of its own groups alone.
        names = () if model.drafter is None else drafter_cache_names(config)
        self._drafter_groups = {name: group for group, name in enumerate(names)}
        self._layers = (structs.DecoderLayer * len(model.layers))(
            *(
                self._bind_layer(index, plan, block)
                for index, (plan, block) in enumerate(zip(config.layers, model.layers, strict=True))
                if isinstance(block, DecoderBlock)
            )
        )
        drafter = None if model.drafter is None else self._bind_drafter(model.drafter)
        head = bind.source(model.head_rows())
        self._struct = structs.DecoderModel(
            embed=bind.embedding(model.embed),
            head=head,
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
        if config.hyper is not None:
            self._struct.num_streams = config.hyper.num_streams
            self._struct.sinkhorn_iterations = config.hyper.num_iterations
            self._struct.hyper_eps = config.hyper.eps
        if model.layer_inputs is not None:
            self._bind_layer_inputs(model.layer_inputs)
        self._drafter = drafter
        if drafter is not None:
            drafter.block.embed, drafter.block.head = self._struct.embed, head

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures | None = None,
    ) -> torch.Tensor:
        """Return the residual stream fp32 ``[T, D]``; see ``DecoderForCausalLM``."""
        del kv_caches  # the structs hold their addresses
        stream = torch.empty(len(token_ids), self._model.config.hidden_size, dtype=torch.float32)
        if len(token_ids):
            self._drafts = self._make_room(meta.num_drafts)
            images = self._model.config.images
            if pictures is not None and images is not None:
                # The embeddings of their tokens are overwritten, their layers' inputs are not.
                token_ids = pictures.hide_ids(token_ids, images.input_token_id)
            step = make_step(token_ids, positions, meta, self._drafts)
            if pictures is not None:
                put_pictures(step, pictures, self._model.config.hidden_size)
            if (rows := self._decode_inputs(token_ids)) is not None:
                step.input_rows = rows.data_ptr()
            self._context.decoder_forward(self._struct, step, stream)
        return stream

    def settle_drafts(self, slices: Sequence[RequestSlice], num_accepted: Sequence[int]) -> None:
        """Stores the recurrent states behind the last step's accepted drafts.

        Args:
            slices: The step's requests.
            num_accepted: Of each, how many of its drafts stand.

        Raises:
            InvariantError: A state that is read or left has no blocks (I5).
        """
        kept, self._drafts = self._drafts, None
        tables = build_settled_tables(slices, num_accepted, self._layout)
        if kept is None or not tables.num_requests:
            return
        step = tables.to_struct(0, 0, 0)
        step.drafts, step.total_drafts = kept.data_ptr(), kept.shape[1]
        self._context.decoder_settle(self._struct, step)

    def _make_room(self, num_drafts: int) -> torch.Tensor | None:
        """Returns memory for what drafts would do to states; None: there are none."""
        plans = self._model.config.recurrences
        if not plans or not num_drafts:
            return None
        width = plans[0].num_channels + plans[0].num_decays + plans[0].state_heads[0]
        return torch.empty(len(plans), num_drafts, width, dtype=torch.float32)

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of any rows of the stream."""
        return self._compute_logits(streams, is_normed=False)

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Return what the head reads of rows of the stream: fp32 ``[M, D]``."""
        streams = streams.contiguous()
        normed = torch.empty_like(streams)
        self._context.decoder_norm(self._struct, streams, normed)
        return normed

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: NativeTables,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures | None = None,
    ) -> torch.Tensor:
        """Return the normed output ``[T, D]`` of the block that drafts.

        See ``DecoderForCausalLM``; ``meta`` lists its groups alone.
        """
        del kv_caches
        assert self._drafter is not None, "the block does not run"
        streams = streams.contiguous()
        output = torch.empty_like(streams)
        if len(positions):
            step = make_step(next_token_ids, positions, meta)
            if pictures is not None:
                put_pictures(step, pictures, self._model.config.hidden_size)
            self._context.decoder_draft(self._drafter, step, streams, output)
        return output

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits ``[M, V]`` of that output."""
        return self._compute_logits(streams, is_normed=True)

    def _compute_logits(self, streams: torch.Tensor, *, is_normed: bool) -> torch.Tensor:
        streams = streams.contiguous()
        logits = torch.empty(len(streams), self._model.config.vocab_size, dtype=torch.float32)
        self._context.decoder_logits(self._struct, streams, logits, is_normed=is_normed)
        return logits

    def _decode_inputs(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Returns the rows of a table that the kernels cannot read, fp32; None: they look."""
        inputs = self._model.layer_inputs
        table = None if inputs is None else inputs.table
        if table is None or not table.is_coded:
            return None
        rows: torch.Tensor = table(token_ids).float().contiguous()
        return rows

    def _norm(self, weight: torch.Tensor) -> int:
        wide = weight.detach().float()
        return self._binder.vector(wide + 1 if self._model.config.norm.has_offset else wide)

    def _vector(self, values: torch.Tensor | None) -> int | None:
        return None if values is None else self._binder.vector(values)

    def _cache(self, name: str, head_dim: int = 0) -> structs.Cache:
        return self._binder.cache(name, self._drafter_groups.get(name), head_dim)

    def _bind_drafter(self, module: DecoderDrafter) -> structs.DecoderDrafter:
        """Binds the block that drafts, but for the embedding and the head."""
        model, config = self._model, self._model.config
        assert config.drafter is not None, "it has a plan"
        layer = self._bind_layer(len(config.layers), config.drafter, module.block)
        self._parts.append(layer)
        embedding_norm, stream_norm, norm = (self._norm(weight) for weight in module.norms)
        return structs.DecoderDrafter(
            block=structs.DecoderModel(
                norm=norm,
                layers=pointer(layer),
                num_layers=1,
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                last_owner=1,  # none: all rows are computed
                embedding_scale=model.embedding_scale,
                final_soft_cap=config.final_soft_cap,
                norm_eps=config.norm.eps,
            ),
            fc=self._binder.linear(module.fc),
            embedding_norm=embedding_norm,
            stream_norm=stream_norm,
            skips_first=config.drafter_skips_first,
        )

    def _bind_layer(self, index: int, plan: LayerPlan, block: DecoderBlock) -> structs.DecoderLayer:
        norms = [self._norm(weight) for weight in block.norms]
        if len(norms) == 2:
            in_order: list[int | None] = [norms[0], None, norms[1], None]
        else:
            in_order = [*norms]
        layer = structs.DecoderLayer(
            norms=(c_void_p * 4)(*in_order),
            window=plan.window,
            scalar=1.0 if block.scalar is None else float(block.scalar),
            sees_pictures=self._model.config.sees_pictures_both_ways(plan),
        )
        if isinstance(block.attention, RecurrentNet):
            layer.has_own_rows = True
            layer.recurrence = self._bind_recurrence(index, block.attention)
        else:
            owner = index if plan.kv_owner is None else plan.kv_owner
            layer.cache = self._cache(cache_name(owner), self._model.config.shape_of(plan).head_dim)
            self._bind_heads(layer, index, plan)
            if isinstance(block.attention, LatentAttention):
                self._bind_latents(layer, block.attention)
                if isinstance(block.attention, IndexedAttention):
                    layer.indexer = self._bind_indexer(index, plan, block.attention)
                    layer.keeps_choice = plan.index_owner is not None
            else:
                assert isinstance(block.attention, DecoderAttention)
                self._bind_attention(layer, block.attention)
        self._bind_feed_forward(layer, plan, block.feed_forward)
        if block.hyper is not None:
            layer.attn_hyper = self._binder.hyper(block.hyper.attention)
            layer.ffn_hyper = self._binder.hyper(block.hyper.feed_forward)
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
        layer.has_output_gate = shape.has_output_gate
        layer.norms_whole_rows = shape.norms_whole_rows
        layer.position_beta, layer.position_length = shape.position_beta, shape.position_length
        if plan.rope is not None:
            self._bind_rope(layer, plan.rope)

    def _bind_rope(self, layer: structs.DecoderLayer, rope: RopeConfig) -> None:
        if rope not in self._frequencies:
            frequencies = find_frequencies(rope, torch.device("cpu"))
            self._frequencies[rope] = self._binder.vector(frequencies)
            if rope.sections:
                self._axes[rope] = (c_int32 * (rope.dim // 2))(*rope.axis_of_pair)
        layer.frequencies = self._frequencies[rope]
        layer.magnitude, layer.num_turned = rope.magnitude, rope.dim
        if rope.sections:
            layer.axis_of_pair = addressof(self._axes[rope])

    def _bind_recurrence(self, index: int, module: RecurrentNet) -> Any:
        bind = self._binder
        states = bind.cache(STATES)
        state = self._layout.groups[states.group].state
        assert state is not None, "the group keeps states"
        before = self._model.config.layers[:index]
        assert isinstance(module, GatedDeltaNet | ChannelDecayNet | ShortConvolution)
        bound = structs.Recurrence(
            in_proj=bind.linear(module.in_proj),
            output=bind.linear(module.output),
            conv=bind.vector(module.conv.squeeze(1).T),
            states=states,
            number=sum(layer.recurrence is not None for layer in before),
            num_channels=module.plan.num_channels,
            conv_width=module.plan.conv_width,
            heads_per_block=state.heads_per_block,
            channels_per_block=state.channels_per_block,
            num_head_pieces=state.num_head_blocks,
            num_pieces=state.num_blocks,
        )
        if not isinstance(module, ShortConvolution):
            self._bind_delta_rule(bound, module)
        self._parts.append(bound)
        return pointer(bound)

    def _bind_delta_rule(
        self, bound: structs.Recurrence, module: GatedDeltaNet | ChannelDecayNet
    ) -> None:
        bind, plan = self._binder, module.plan
        bound.decay_rates = bind.vector(module.a_log.exp())
        bound.dt_bias, bound.norm = bind.vector(module.dt_bias), bind.vector(module.norm)
        bound.num_key_heads, bound.num_heads = plan.num_key_heads, plan.num_value_heads
        bound.key_dim, bound.value_dim = plan.key_dim, plan.value_dim
        bound.is_interleaved = plan.is_interleaved
        bound.has_sigmoid_gate = plan.gate_activation == "sigmoid"
        bound.has_channel_decays, bound.decay_bound = plan.has_channel_decays, plan.decay_bound
        if isinstance(module, ChannelDecayNet):
            # A rate for each head, as of the others.
            bound.decays, bound.gates = bind.linear(module.decays), bind.linear(module.gates)

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
        self._parts.append(bound)
        return pointer(bound)

    def _bind_layer_inputs(self, module: LayerInputs) -> None:
        own, bind = self._struct, self._binder
        assert module.table is not None, "whose tokens see both ways are not bound"
        if not module.table.is_coded:
            own.input_table = bind.table(module.table.rows)
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
        layer.key_sizes = self._vector(attention.key_sizes)
        layer.noted_queries = self._vector(attention.noted_queries)
        if attention.qk_norm is not None:
            norms = [self._norm(weight) for weight in attention.qk_norm]
            layer.q_norm, layer.k_norm = norms[0], norms[-1]
        if attention.row_norms:
            layer.q_norm = self._norm(attention.row_norms[0])
            layer.k_norm = self._norm(attention.row_norms[-1])

    def _bind_latents(self, layer: structs.DecoderLayer, attention: LatentAttention) -> None:
        bind, shape = self._binder, attention.latent
        keys, values = attention.split_heads()
        layer.qkv = bind.linear(attention.projections)
        layer.output = bind.linear(attention.output)
        bound = structs.Latents(
            key_maps=bind.copied_matrix(keys.mT),
            value_maps=bind.copied_matrix(values),
            norm=bind.vector(attention.row_norm),
            latent_dim=shape.latent_dim,
            shared_dim=shape.shared_dim,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            query_rank=shape.query_rank,
            eps=shape.eps,
        )
        if attention.queries is not None and attention.query_norm is not None:
            bound.queries = bind.linear(attention.queries)
            bound.query_norm = bind.vector(attention.query_norm)
        self._parts.append(bound)
        layer.latents = pointer(bound)

    def _bind_indexer(self, index: int, plan: LayerPlan, attention: IndexedAttention) -> Any:
        if plan.index_owner is not None:
            return self._indexers[plan.index_owner]
        bind, module = self._binder, attention.indexer
        assert module is not None, "the layer has one of its own"
        bound = structs.PoolIndexer(
            queries=bind.linear(module.queries),
            inputs=bind.linear(module.inputs),
            key_norm=bind.vector(module.key_norm),
            keys=self._cache(pool_keys_name(index)),
            num_heads=module.plan.num_heads,
            width=module.plan.head_dim,
            pool_size=module.plan.pool_size,
            num_chosen=module.plan.num_chosen,
            turns_pairs=module.plan.turns_pairs,
        )
        if isinstance(module.pool_keys, PoolKeys):
            bound.gate = bind.matrix(module.pool_keys.gate)
            bound.place_bias = bind.vector(module.pool_keys.place_bias)
            bound.state = self._cache(pool_state_name(index))
        self._parts.append(bound)
        self._indexers[index] = pointer(bound)
        return self._indexers[index]

    def _bind_feed_forward(
        self,
        layer: structs.DecoderLayer,
        plan: LayerPlan,
        module: GatedMlp | ExpertBank | ClampedExperts,
    ) -> None:
        bind, own = self._binder, plan.feed_forward
        layer.inner = own.inner_size
        if isinstance(module, GatedMlp):
            assert isinstance(own, MlpPlan)
            layer.feed_forward, layer.limit = structs.MLP, own.limit
            layer.activation = _find_activation(own)
            layer.gate_up = bind.linear(module.gate_up)
            layer.down = bind.linear(module.down)
            layer.gate_up_bias = self._vector(module.gate_up_bias)
            layer.down_bias = self._vector(module.down_bias)
            return
        layer.feed_forward, layer.router = structs.EXPERTS, bind.matrix(module.router)
        layer.num_experts, layer.num_chosen = module.plan.num_experts, module.plan.num_chosen
        if isinstance(module, ExpertBank):
            layer.activation, layer.limit = _find_activation(module.plan), module.plan.limit
            layer.normalises = module.plan.normalises
            layer.gate_up, layer.down = self._bind_experts(module)
            if isinstance(module, SharedExperts):
                layer.shared_expert = self._bind_shared(module.shared, module.shared_gate)
            if isinstance(module, SigmoidExperts):
                layer.scores = self._bind_router(module)
                if module.shared is not None:
                    layer.shared_expert = self._bind_shared(module.shared, None)
            return
        layer.activation, layer.normalises = structs.CLAMPED, True
        layer.alpha, layer.limit = module.plan.alpha, module.plan.limit
        layer.router_bias = bind.vector(module.router_bias)
        layer.gate_up_bias = bind.vector(module.gate_up_bias)
        layer.down_bias = bind.vector(module.down_bias)
        layer.gate_up = self._bind_stack(module.gate_up)
        layer.down = self._bind_stack(module.down)

    def _bind_shared(self, shared: GatedMlp, gate: torch.Tensor | None) -> Any:
        bind = self._binder
        bound = structs.SharedExpert(
            gate_up=bind.linear(shared.gate_up),
            down=bind.linear(shared.down),
            inner=sum(shared.gate_up.out_sizes) // 2,
        )
        if gate is not None:
            bound.gate = bind.matrix(gate)
        self._parts.append(bound)
        return pointer(bound)

    def _bind_router(self, module: SigmoidExperts) -> Any:
        plan = module.plan.router
        assert plan is not None, "its experts are chosen by sigmoids"
        bound = structs.SigmoidRouter(
            bias=self._binder.vector(module.router_bias),
            num_groups=plan.num_groups,
            num_chosen_groups=plan.num_chosen_groups,
            factor=plan.factor,
            is_softmax=plan.is_softmax,
        )
        self._parts.append(bound)
        return pointer(bound)

    def _bind_stack(self, stack: Stack) -> structs.Matrix:
        if isinstance(stack, PackedStack):
            return self._binder.stack([matrix.row_source for matrix in stack.matrices])
        if isinstance(stack, MxFp4Stack):
            return self._binder.mxfp4_matrix(stack.codes, stack.scales)
        return self._binder.matrix(stack.weight)


def can_run_decoder(model: DecoderForCausalLM, kv_caches: Mapping[str, torch.Tensor]) -> bool:
    """Whether the kernels take this model's weights and caches."""
    hyper = model.config.hyper
    if model.config.sees_both_ways:
        return False
    if hyper is not None and hyper.num_streams > MAX_STREAMS:
        return False
    if STATES in kv_caches and kv_caches[STATES].dtype != torch.float32:
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
    table = None if model.layer_inputs is None else model.layer_inputs.table
    if table is not None and not table.is_coded:
        sources.append(PlainRows(table.rows))
    has_tensors = can_read_tensors(model, kv_caches, has_coded_rows=True)
    return has_tensors and all(can_read_rows(rows) for rows in sources)


def _find_activation(plan: MlpPlan | ExpertsPlan) -> int:
    return structs.LIMITED_SILU if plan.limit > 0 else _ACTIVATIONS[plan.activation]
