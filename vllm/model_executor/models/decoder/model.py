"""Any decoder that a ``DecoderConfig`` describes; ops are asked for by name."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.hyper_connections import HyperConnection
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.model_executor.layers.vocab import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_names import TensorPart
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.decoder.attention import DecoderAttention
from vllm.model_executor.models.decoder.channel_decays import ChannelDecayNet
from vllm.model_executor.models.decoder.config import (
    MTP,
    DecoderConfig,
    ExpertsPlan,
    FeedForwardPlan,
    GatedDeltaPlan,
    HyperPlan,
    LayerPlan,
    ShortConvolutionPlan,
)
from vllm.model_executor.models.decoder.experts_beside import ExpertsBeside
from vllm.model_executor.models.decoder.feed_forward import build_feed_forward
from vllm.model_executor.models.decoder.gated_delta import SPLIT_TENSORS, GatedDeltaNet
from vllm.model_executor.models.decoder.indexed_attention import IndexedAttention
from vllm.model_executor.models.decoder.latent_attention import LatentAttention
from vllm.model_executor.models.decoder.layer_inputs import LayerInputBlock, LayerInputs
from vllm.model_executor.models.decoder.paged_attention import PagedAttention
from vllm.model_executor.models.decoder.recurrence import RecurrentNet
from vllm.model_executor.models.decoder.short_convolution import ShortConvolution
from vllm.model_executor.models.decoder.step import ModelParts, Step, StepFactory
from vllm.v1.attention.ops.stored import RowSource
from vllm.v1.attention.step_pictures import StepPictures
from vllm.v1.attention.step_tables import RecurrentRows, StepMetadata

_EMBEDDING = "model.embed_tokens"
_HEAD = "lm_head"
_CHANNELS = re.compile(r"(.+\.linear_attn\.)(in_proj_qkv|conv1d)\.weight")
_STACKED_EXPERTS = re.compile(r"(.+\.(?:mlp\.)?experts\.)(gate_up_proj|down_proj)")
# Old checkpoints carry the rotary frequencies, which follow from config.json.
_DERIVED = ".rotary_emb.inv_freq"


def build_mixer(index: int, plan: LayerPlan, parts: ModelParts) -> PagedAttention | RecurrentNet:
    """Returns what mixes a layer's tokens, its tensors named within ``parts``' prefix."""
    own = plan.recurrence
    if isinstance(own, ShortConvolutionPlan):
        return ShortConvolution(index, own, parts)
    if own is not None:
        return (ChannelDecayNet if own.has_channel_decays else GatedDeltaNet)(index, own, parts)
    latent = parts.config.shape_of(plan).latent
    if latent is None:
        return DecoderAttention(index, plan, parts)
    return (IndexedAttention if latent.indexer else LatentAttention)(index, plan, parts)


def find_mixer_name(plan: LayerPlan) -> str:
    """Returns what the releases call the part that mixes a layer's tokens."""
    own = plan.recurrence
    if isinstance(own, ShortConvolutionPlan):
        return "conv"
    return "self_attn" if own is None or own.has_channel_decays else "linear_attn"


def find_feed_forward_name(plan: FeedForwardPlan) -> str:
    """Returns what the releases call a layer's second half."""
    router = plan.router if isinstance(plan, ExpertsPlan) else None
    return "block_sparse_moe" if router is not None and router.has_numbered_names else "mlp"


class HyperPair(nn.Module):
    """The connections of a layer's two halves with the residual streams.

    Args:
        plan: How they are mixed.
        parts: What to build from.
    """

    def __init__(self, plan: HyperPlan, parts: ModelParts) -> None:
        super().__init__()
        config = parts.config
        self.attention, self.feed_forward = (
            HyperConnection(
                plan.num_streams,
                config.hidden_size,
                config.norm.eps,
                plan.eps,
                plan.num_iterations,
                parts.ops,
                parts.make,
            )
            for _ in range(2)
        )

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        return {
            **self.attention.weight_slots(f"{prefix}.hc_attn"),
            **self.feed_forward.weight_slots(f"{prefix}.hc_ffn"),
        }


class DecoderBlock(nn.Module):
    """One layer: attention or a recurrence, then a feed-forward part, each added to the stream.

    Args:
        index: The layer.
        plan: What it is.
        parts: What to build from.
        prefix: Of its tensors' names; None: by the index.
    """

    def __init__(
        self, index: int, plan: LayerPlan, parts: ModelParts, prefix: str | None = None
    ) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        self._prefix = prefix = prefix or f"model.layers.{index}"
        self._plan = config.norm
        self._mixer_name = f"{prefix}.{find_mixer_name(plan)}"
        self._feed_forward_name = f"{prefix}.{find_feed_forward_name(plan.feed_forward)}"
        self.attention = build_mixer(index, plan, parts.within(self._mixer_name))
        self.feed_forward = build_feed_forward(
            plan.feed_forward, parts.within(self._feed_forward_name)
        )
        self.experts = (
            None if plan.experts is None else ExpertsBeside(plan.experts, parts.within(prefix))
        )
        self.layer_input = (
            LayerInputBlock(config.layer_inputs.width, parts.within(prefix))
            if config.layer_inputs is not None
            else None
        )
        self.scalar = make.parameter(1) if config.has_layer_scalars else None
        self.hyper = (
            None
            if config.hyper is None or plan is config.drafter
            else HyperPair(config.hyper, parts)
        )
        self._index = index
        self._narrows = index == config.last_owner
        num_norms = 4 if config.norm.is_sandwich else 2
        self.norms = make.parameter(num_norms, config.hidden_size)
        self._norm = parts.ops("rms_norm_offset" if config.norm.has_offset else "rms_norm")

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the residual stream [T, D] to [T, D]; writes the layer's cache.

        The last layer with a cache returns the step's wanted rows alone, those above take them.
        Where there are several streams, they are [T, n, D].
        """
        if self.hyper is not None:
            return self._forward_streams(self.hyper, x, step)
        attended = self.attention(self._norm(x, self.norms[0], self._plan.eps), step)
        if self._narrows and step.wanted is not None:
            x, step = x[step.wanted], step.narrow()
            if not len(x):
                return x
        x = self._add_feed_forward(x, attended)
        if self.layer_input is not None:
            assert step.layer_inputs is not None
            x = self.layer_input(x, step.layer_inputs[:, self._index])
        return x if self.scalar is None else x * self.scalar

    def _forward_streams(self, hyper: "HyperPair", x: torch.Tensor, step: Step) -> torch.Tensor:
        eps = self._plan.eps
        read, post, mix = hyper.attention.read(x)
        attended = self.attention(self._norm(read, self.norms[0], eps), step)
        if self._narrows and step.wanted is not None:
            x, post, mix = x[step.wanted], post[step.wanted], mix[step.wanted]
            if not len(x):
                return x
        x = hyper.attention.write(attended, x, post, mix)
        read, post, mix = hyper.feed_forward.read(x)
        mapped = self.feed_forward(self._norm(read, self.norms[1], eps))
        return hyper.feed_forward.write(mapped, x, post, mix)

    def _add_feed_forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        eps = self._plan.eps
        if not self._plan.is_sandwich:
            x = x + attended
            mapped: torch.Tensor = self.feed_forward(self._norm(x, self.norms[1], eps))
            return x + mapped
        x = x + self._norm(attended, self.norms[1], eps)
        mapped = self.feed_forward(self._norm(x, self.norms[2], eps))
        if self.experts is not None:
            mapped = self.experts(mapped, x)
        normed: torch.Tensor = self._norm(mapped, self.norms[3], eps)
        return x + normed

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        names = ["input_layernorm", "post_attention_layernorm"]
        if self._plan.is_sandwich:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        norms = zip(names, self.norms.data, strict=True)
        slots = {
            **{f"{self._prefix}.{name}.weight": weight for name, weight in norms},
            **self.attention.weight_slots(self._mixer_name),
            **self.feed_forward.weight_slots(self._feed_forward_name),
        }
        if self.experts is not None:
            slots |= self.experts.weight_slots(self._prefix)
        if self.layer_input is not None:
            slots |= self.layer_input.weight_slots(self._prefix)
        if self.scalar is not None:
            slots[f"{self._prefix}.layer_scalar"] = self.scalar.data
        if self.hyper is not None:
            slots |= self.hyper.weight_slots(self._prefix)
        return slots


class DecoderDrafter(nn.Module):
    """A block that drafts the token after the next: one layer over stream and next token.

        x = fc [ norm(embedding of the token at t + 1) | norm(normed stream of t) ]

    Args:
        plan: Its layer.
        parts: What to build from.
    """

    def __init__(self, plan: LayerPlan, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        width = config.hidden_size
        self.fc = ReplicatedLinear(2 * width, (width,), make.within("mtp"), ("fc",))
        self.norms = make.parameter(3, width)
        self.block = DecoderBlock(len(config.layers), plan, parts, "mtp.layers.0")
        self._eps = config.norm.eps
        self._norm = parts.ops("rms_norm_offset" if config.norm.has_offset else "rms_norm")

    def forward(
        self, streams: torch.Tensor, next_embeddings: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Maps normed streams [T, D] of t and embeddings [T, D] of t + 1 to its output [T, D]."""
        embedded = self._norm(next_embeddings, self.norms[0], self._eps)
        hidden = self._norm(streams, self.norms[1], self._eps)
        x = self.block(self.fc(torch.cat([embedded, hidden], -1)), step)
        normed: torch.Tensor = self._norm(x, self.norms[2], self._eps)
        return normed

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination."""
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        return {
            **self.fc.part_slots(0, "mtp.fc"),
            **{
                f"mtp.{name}.weight": norm
                for name, norm in zip(names, self.norms.data, strict=True)
            },
            **self.block.weight_slots(),
        }


class DecoderForCausalLM(CausalLM[DecoderConfig]):
    """A decoder for generation; routers and sinks stay fp32."""

    takes_pictures: ClassVar[bool] = True
    """Whether steps may have ``StepPictures``."""

    def _build(self, parts: ModelParts) -> None:
        config, make, ops = parts.config, parts.make, parts.ops
        self.embed = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            make,
            name=f"{_EMBEDDING}.weight",
            matrix_name=_EMBEDDING,
        )
        self.layers = nn.ModuleList(
            DecoderBlock(index, plan, parts) for index, plan in enumerate(config.layers)
        )
        self.layer_inputs = (
            None if config.layer_inputs is None else LayerInputs(config.layer_inputs, parts)
        )
        self.norm = make.parameter(config.hidden_size)
        self._group = make.group
        num_rows = shard_size("vocab_size", config.vocab_size, make.group)
        # A tied head is the embedding, in whatever way that is stored.
        self._quantised_head = (
            make.quantised_matrix(_HEAD, config.hidden_size, num_rows)
            if config.has_head
            else self.embed.quantised
        )
        self.head = self.embed.weight
        if config.has_head:
            kept_rows = 0 if self._quantised_head else num_rows
            dtype = make.kept_dtype(make.dtype, f"{_HEAD}.weight")
            self.head = make.parameter(kept_rows, config.hidden_size, dtype=dtype)
        self._stored_linear = ops("stored_linear")
        # Rounded as the published models round it.
        self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=make.dtype))
        self._unstacks_experts = any(
            isinstance(part, ExpertsPlan)
            for plan in config.layers
            for part in (plan.feed_forward, plan.experts)
        )
        self._make_step = StepFactory(parts)
        self._norm = ops("rms_norm_offset" if config.norm.has_offset else "rms_norm")
        self._project = ops("project_to_logits")
        self.drafter = None if config.drafter is None else DecoderDrafter(config.drafter, parts)
        self._soft_cap_ = ops("soft_cap_")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures | None = None,
    ) -> torch.Tensor:
        """Returns the residual stream [T, D] after the last layer, before the last norm.

        Rows of chunks that nobody wants are zeros: above the last layer with a cache they are not
        computed.
        """
        x: torch.Tensor = self.embed(token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if not meta.num_tokens:
            return x
        if pictures is not None:
            # As the tower made them: no scale.
            pictures.merge_into(x)
            if self.config.images is not None:
                token_ids = pictures.hide_ids(token_ids, self.config.images.input_token_id)
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs(token_ids, x)
        axes = None if pictures is None else pictures.axes
        step = self._make_step(positions, meta, kv_caches, layer_inputs, axes)
        last_owner, hyper = self.config.last_owner, self.config.hyper
        if hyper is not None:
            x = x.unsqueeze(1).expand(-1, hyper.num_streams, -1)
        for index, layer in enumerate(self.layers):
            x = layer(x, step)
            if index == last_owner:
                step = step.narrow()
                if not len(x):
                    break
        if hyper is not None:
            x = x.mean(1)
        if step.wanted is None:
            return x
        stream = x.new_zeros(meta.num_tokens, x.shape[1])
        stream[step.wanted] = x
        return stream

    def map_weight(self, name: str, values: torch.Tensor) -> None:
        """Takes a tensor whose slot is on no device, as it lies in its file."""
        inputs = self.layer_inputs
        table = None if inputs is None else inputs.table
        assert table is not None, f"{name} has a slot of its own"
        table.take(values)

    def settle_drafts(
        self, settled: Sequence[RecurrentRows | None], kv_caches: Mapping[str, torch.Tensor]
    ) -> None:
        """Stores the recurrent states behind the last step's accepted drafts.

        Args:
            settled: For each request of that step that had drafts, in order, what its accepted
                ones read and leave; None: none stands.
            kv_caches: Cache name -> pages.

        Mutates:
            kv_caches.
        """
        for layer in self.layers:
            assert isinstance(layer, DecoderBlock)
            if isinstance(layer.attention, RecurrentNet):
                layer.attention.settle_drafts(settled, kv_caches)

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps the residual stream [M, D] of any chosen rows to fp32 logits [M, V]."""
        return self._to_logits(self.norm_streams(streams))

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps the residual stream [M, D] to what the output matrix reads [M, D]."""
        normed: torch.Tensor = self._norm(streams, self.norm, self.config.norm.eps)
        return normed

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
        pictures: StepPictures | None = None,
    ) -> torch.Tensor:
        """Runs the block that drafts at positions t.

        Args:
            streams: [T, D] of positions t: ``norm_streams`` of the last layer's output, or what
                this returned for the position before.
            next_token_ids: int64 [T], the tokens at t + 1.
            positions: int64 [T].
            meta: Index tables of the block's group.
            kv_caches: Cache name -> pages; its rows are written.
            pictures: Those among the tokens at t + 1, and what turns the rows at t.

        Returns:
            Its normed output [T, D]; ``compute_mtp_logits`` predicts t + 2 from it.
        """
        assert self.drafter is not None, "the block does not run"
        axes = None if pictures is None else pictures.axes
        step = replace(self._make_step(positions, meta, kv_caches, None, axes), wanted=None)
        embedded = self.embed(next_token_ids) * self.embedding_scale
        if pictures is not None:
            pictures.merge_into(embedded)
        if self.config.drafter_skips_first:
            embedded = embedded.masked_fill(positions.unsqueeze(1) == 0, 0.0)
        # Kernels give fp32 streams whatever the weights' type.
        drafted: torch.Tensor = self.drafter(streams.to(self.dtype), embedded, step)
        return drafted

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps the block's output [M, D] to fp32 logits [M, V]."""
        return self._to_logits(streams)

    def _to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if self._quantised_head is None:
            logits = self._project(hidden, self.head)
        else:
            source = self._quantised_head.row_source
            assert source is not None, "a head's rows can be decoded"
            logits = self._stored_linear(hidden.float(), source)
        logits = self._group.all_gather(logits)
        if self.config.final_soft_cap:
            logits = self._soft_cap_(logits, self.config.final_soft_cap)
        return logits

    @contextmanager
    def noting_queries(self, num_tokens: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Has layers note the queries of a step that is run, and bound, within.

        Args:
            num_tokens: Of that step.

        Yields:
            For each layer with keys of heads: the name of the cache that it reads, and where its
            queries will stand by key head, fp32 [T, K, G, d].
        """
        attentions = [
            layer.attention
            for layer in self.layers
            if isinstance(layer.attention, DecoderAttention)
        ]
        try:
            yield [attention.note_queries(num_tokens) for attention in attentions]
        finally:
            for attention in attentions:
                attention.forget_queries()

    def put_key_sizes(self, sizes: Mapping[str, torch.Tensor]) -> None:
        """Has layers store their keys divided by sizes, and multiply their queries by them.

        Args:
            sizes: By cache name, fp32 [K, d]; of a cache that is not named nothing is divided.
        """
        for layer in self.layers:
            if isinstance(layer.attention, DecoderAttention):
                layer.attention.put_key_sizes(sizes)

    def head_rows(self) -> RowSource | None:
        """Returns the output matrix as stored rows; None where a platform reads it its own way."""
        if self._quantised_head is not None:
            return self._quantised_head.row_source
        return PlainRows(self.head.data)

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination, as the family's releases name them.

        Experts are slices of stacked parameters. A tied head has no slot of its own.
        """
        slots = {
            **self.embed.weight_slots(_EMBEDDING),
            "model.norm.weight": self.norm.data,
        }
        if self.layer_inputs is not None:
            slots |= self.layer_inputs.weight_slots()
        if self.config.has_head and self._quantised_head is not None:
            slots |= self._quantised_head.slots(_HEAD)
        elif self.config.has_head:
            slots[f"{_HEAD}.weight"] = self.head.data
        for layer in self.layers:
            assert isinstance(layer, DecoderBlock)
            slots.update(layer.weight_slots())
        if self.drafter is not None:
            slots |= self.drafter.weight_slots()
        return slots

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """Translates one stored tensor into the slots it fills.

        transformers stacks a layer's experts: ``gate_up_proj`` [E, 2M, D], ``down_proj`` [E, D, M].

        Args:
            name: The name in the file.
            shape: The shape in the file.
        """
        if name.endswith(_DERIVED):
            return ()
        name = self.config.names.translate(name)
        if (split := self._split_channels(name)) is not None:
            return split
        if fused := self.config.names.find_parts(name):
            return tuple(TensorPart(own, rows=rows) for own, rows in fused)
        match = _STACKED_EXPERTS.fullmatch(name)
        if match is None or len(shape) != 3 or not self._unstacks_experts:
            return (TensorPart(name),)
        prefix, leaf = match.groups()
        num_experts, num_rows, _ = shape
        if leaf == "down_proj":
            return tuple(TensorPart(f"{prefix}{e}.down_proj.weight", e) for e in range(num_experts))
        half = num_rows // 2
        return tuple(
            TensorPart(f"{prefix}{e}.{part}.weight", e, rows)
            for e in range(num_experts)
            for part, rows in (("gate_proj", (0, half)), ("up_proj", (half, num_rows)))
        )

    def _split_channels(self, name: str) -> tuple[TensorPart, ...] | None:
        """Cuts a tensor over queries, keys and values, of which several ranks have their heads.

        None: the tensor is no such, or there is one rank.
        """
        match = _CHANNELS.fullmatch(name)
        plan = next(iter(self.config.recurrences), None)
        if match is None or self._group.size == 1 or not isinstance(plan, GatedDeltaPlan):
            return None
        if plan.has_channel_decays or (plan.is_interleaved and match[2] != "conv1d"):
            return None
        keys = plan.num_key_heads * plan.key_dim
        bounds = (0, keys, 2 * keys, plan.num_channels)
        return tuple(
            TensorPart(f"{match[1]}{part}.weight", rows=rows)
            for part, rows in zip(SPLIT_TENSORS[match[2]], pairwise(bounds), strict=True)
        )

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent: transformers leaves the drafting block out."""
        return (MTP,) if self.drafter is not None else ()

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of checkpoint tensors that have no slot on purpose."""
        taken = self.optional_weight_prefixes
        ignored = tuple(prefix for prefix in self.config.names.ignored if prefix not in taken)
        return ignored + (() if self.config.has_head else ("lm_head.",))
