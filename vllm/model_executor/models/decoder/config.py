"""What a decoder of grouped-query attention looks like, as data (torch-free).

A family's module reads its config.json into a ``DecoderConfig``; ``decoder.model`` builds the
network from it. Sizes are in values, windows in tokens, the query's own included.
"""

import re
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from vllm.exceptions import ConfigError
from vllm.model_executor.models.decoder.rope_config import RopeConfig
from vllm.model_executor.towers.plans import ImagesPlan

Activation = Literal["silu", "gelu_tanh"]
MTP = "mtp."
"""Prefix of the tensors of a block that drafts."""
_BODY_ROOTS = ("embed_tokens.", "layers.", "norm.")
MXFP4_GROUP_SIZE = 32
"""Values under one MXFP4 scale."""


@dataclass(frozen=True, slots=True)
class IndexerPlan:
    """A choice of the keys that a query attends to, by pools of consecutive tokens.

    Where the layer knows positions, they turn the first values of its queries and keys.

    Attributes:
        num_heads, head_dim: Of its own queries and keys.
        pool_size: Tokens of a pool; pools are counted from the first token. 1: a pool is a token,
            and its key the token's.
        num_chosen: Pools that a query attends to, besides its own that is not complete.
        turns_pairs: Whether what positions turn are pairs of neighbours; else two halves.
    """

    num_heads: int
    head_dim: int
    pool_size: int
    num_chosen: int
    turns_pairs: bool = False


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Keys and values of all heads as products of one cached row a token: [latent | shared].

    A head's key is its matrix times the latent, then the shared part; its value another matrix
    times the latent.

    Attributes:
        latent_dim: Values of the latent.
        shared_dim: Values of the part of the keys that all heads share.
        key_dim: Values of a head's own part of its keys.
        value_dim: Values of a head's values.
        eps: Added to the mean square of a latent.
        query_rank: Values of a latent that queries are products of; 0: they are the input's.
        indexer: Chooses the keys of a query; None: it attends to all.
    """

    latent_dim: int
    shared_dim: int
    key_dim: int
    value_dim: int
    eps: float
    query_rank: int = 0
    indexer: IndexerPlan | None = None

    @property
    def row_width(self) -> int:
        """Values of a cached row."""
        return self.latent_dim + self.shared_dim


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention of one layer, or of all.

    Attributes:
        scale: Of query-key products.
        has_qkv_bias, has_output_bias: Whether the projections add a bias.
        has_qk_norm: Whether queries and keys are normed per head before they are turned.
        has_sinks: Whether each head has a learned score without a value.
        soft_cap: Scores are capped by tanh; 0: they are not.
        has_output_gate: Whether each head's output is multiplied by the sigmoid of a gate, which
            stands behind its query in the projection.
        has_value_norm: Whether values are normed per head, without weights.
        has_one_product: Whether keys and values come of one product, ``k_proj``: values before
            its weighted norm and its turn.
        norms_whole_rows: Whether the norms of queries and of keys are over all heads together.
        position_beta, position_length: Queries are scaled by 1 + beta * log(1 + floor(position /
            length)); 0: they are not.
        latent: What keys and values are made of, where a row of it is cached in their place:
            ``head_dim`` is that row's width then, and ``num_kv_heads`` one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False
    soft_cap: float = 0.0
    has_output_gate: bool = False
    has_value_norm: bool = False
    has_one_product: bool = False
    norms_whole_rows: bool = False
    position_beta: float = 0.0
    position_length: int = 0
    latent: LatentShape | None = None

    def for_ranks(self, size: int) -> "AttentionShape":
        """Returns the heads of one of ``size`` ranks; several hold the same key head if need be."""
        num_kv_heads = max(1, self.num_kv_heads // size)
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=num_kv_heads)


@dataclass(frozen=True, slots=True)
class GatedDeltaPlan:
    """A recurrent layer by the gated delta rule, in the place of attention.

    Attributes:
        num_key_heads: Heads of queries and of keys; value heads next to each other share one.
        num_value_heads: Heads of values, and of states.
        key_dim, value_dim: Values of a head.
        conv_width: Inputs that the short convolution reads of each channel, its own included.
        is_interleaved: Whether the projections lie by key head: query, key, its values, its gates.
        gate_activation: Of the output's gate: "silu" or "sigmoid".
        has_channel_decays: Whether each channel of a key decays by itself, not the head as a whole;
            decays and gates are products of two narrow matrices then.
        decay_bound: How far below zero a logarithm of a decay may be, by a sigmoid; 0: there is no
            bound, it is a softplus.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    is_interleaved: bool = False
    gate_activation: str = "silu"
    has_channel_decays: bool = False
    decay_bound: float = 0.0

    def for_ranks(self, size: int) -> "GatedDeltaPlan":
        """Returns the heads of one of ``size`` ranks."""
        key_heads, value_heads = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=key_heads, num_value_heads=value_heads)

    @property
    def num_channels(self) -> int:
        """Inputs of the short convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        """Decays of a token: one a head, or one for each channel of it."""
        return self.num_value_heads * (self.key_dim if self.has_channel_decays else 1)

    @property
    def state_heads(self) -> tuple[int, int, int]:
        """Heads of a state, and the rows and columns of one."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def check(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            ConfigError: They do not.
        """
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_num_key_heads is {self.num_key_heads}: it must divide "
                f"linear_num_value_heads ({self.num_value_heads})"
            )
        if self.conv_width < 2:
            raise ConfigError("linear_conv_kernel_dim is 1: it must be at least 2")


@dataclass(frozen=True, slots=True)
class ShortConvolutionPlan:
    """A gated short convolution in the place of attention, whose state is its last inputs.

    Attributes:
        num_channels: Of the convolution, as many as the stream has.
        conv_width: Inputs that it reads of each channel, its own included.
    """

    num_channels: int
    conv_width: int

    def for_ranks(self, size: int) -> "ShortConvolutionPlan":
        """Returns itself: it is not shared out."""
        del size
        return self

    @property
    def state_heads(self) -> tuple[int, int, int]:
        """There is no matrix beside the inputs."""
        return 0, 0, 0

    @property
    def num_decays(self) -> int:
        """Nothing decays."""
        return 0

    def check(self) -> None:
        """Refuse a convolution that remembers nothing.

        Raises:
            ConfigError: It does not.
        """
        if self.conv_width < 2:
            raise ConfigError("conv_L_cache is 1: it must be at least 2")


RecurrencePlan = GatedDeltaPlan | ShortConvolutionPlan


@dataclass(frozen=True, slots=True)
class MlpPlan:
    """A gated feed-forward layer: down(activation(gate(x)) * up(x)).

    Attributes:
        limit: The gate is at most this, up within it on both sides; 0: they are as they are.
    """

    inner_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class SigmoidRouter:
    """Each expert has a score of its own; a bias takes part in the choice alone.

    Attributes:
        num_groups: Experts are neighbours in so many groups of one size.
        num_chosen_groups: A token's experts come from so many groups, those whose best two sum up
            to most.
        factor: The chosen scores are multiplied by it at last.
        is_softmax: Whether the scores are a softmax over all experts, without a bias, and a group's
            rank that of its best; else the sigmoids of their logits.
        has_numbered_names: Whether the part is ``block_sparse_moe`` in files and an expert's
            matrices w1, w3 and w2, as Kimi's.
    """

    num_groups: int
    num_chosen_groups: int
    factor: float
    is_softmax: bool = False
    has_numbered_names: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Routed experts, each a gated MLP.

    Attributes:
        inner_size: Of one expert.
        num_chosen: Experts per token.
        normalises: Whether the chosen weights are scaled to a sum of one.
        shared: A gated MLP that every token passes besides: as it is under a ``router``, else times
            the sigmoid of a learned gate.
        router: How experts are chosen; None: by a softmax over all of them.
        limit: As an ``MlpPlan``'s, of every expert.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    normalises: bool
    activation: Activation = "silu"
    shared: MlpPlan | None = None
    router: SigmoidRouter | None = None
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class ClampedExpertsPlan:
    """gpt-oss's experts: biases everywhere, (up + 1) * gate * sigmoid(alpha * gate), clamped.

    Attributes:
        inner_size: Of one expert.
        num_chosen: Experts per token.
        is_mxfp4: Whether the weights are e2m1 values in groups of 32 under e8m0 scales.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    alpha: float
    limit: float
    is_mxfp4: bool


FeedForwardPlan = MlpPlan | ExpertsPlan | ClampedExpertsPlan


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer.

    Attributes:
        window: Tokens it attends to; 0: all.
        rope: How its queries and keys are turned; None: not at all.
        feed_forward: Its second half.
        attention: Its heads; None: the config's.
        kv_owner: The layer below whose keys and values it attends to in place of its own; None: it
            has its own.
        experts: Routed experts beside the feed-forward part, with norms of their own.
        recurrence: What stands in the place of attention; None: attention.
        index_owner: The layer below whose indexer chooses its keys, and which has one of its own;
            None: its own, if keys are chosen.
    """

    window: int
    rope: RopeConfig | None
    feed_forward: FeedForwardPlan
    attention: AttentionShape | None = None
    kv_owner: int | None = None
    experts: ExpertsPlan | None = None
    recurrence: RecurrencePlan | None = None
    index_owner: int | None = None


@dataclass(frozen=True, slots=True)
class LayerInputsPlan:
    """A small input of its own for each layer and token: from a table, and from the embedding.

    Attributes:
        vocab_size: Rows of the table; 0: there is none.
        width: Values per layer and token.
    """

    vocab_size: int
    width: int


@dataclass(frozen=True, slots=True)
class NormPlan:
    """The norms of every layer.

    Attributes:
        eps: Added to the mean square.
        has_offset: Whether weights are stored less one.
        is_sandwich: Whether attention and feed-forward are normed on their way out too.
    """

    eps: float
    has_offset: bool = False
    is_sandwich: bool = False


@dataclass(frozen=True, slots=True)
class HyperPlan:
    """Several residual streams, mixed around each half of a layer; the last layer's mean is read.

    Attributes:
        num_streams: How many.
        eps: Added to the reading weights, the mixing matrix and its sums.
        num_iterations: Passes over the mixing matrix.
    """

    num_streams: int
    eps: float
    num_iterations: int


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a checkpoint spells its tensors.

    Attributes:
        prefixes: Prefix in the file -> prefix here; the first that fits is replaced.
        ignored: Prefixes (after that) of tensors that are left out on purpose.
        spellings: Pattern -> replacement: other spellings of parts of a name.
        fused: Part of a name -> what stands for it in the names of the tensors that one is, each
            with its rows.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    def find_parts(self, name: str) -> tuple[tuple[str, tuple[int, int]], ...]:
        """Returns the tensors that a fused one is, each with its rows; empty: it is one."""
        for part, own in self.fused:
            if part in name:
                bounds = [0, *accumulate(rows for _, rows in own)]
                names = [name.replace(part, ours) for ours, _ in own]
                return tuple(zip(names, pairwise(bounds), strict=True))
        return ()

    def translate(self, name: str) -> str:
        """Returns a tensor's name here, of that in the file."""
        for stored, ours in self.prefixes:
            if name.startswith(stored):
                name = ours + name.removeprefix(stored)
                break
        for pattern, ours in self.spellings:
            name = re.sub(pattern, ours, name)
        # A body that was saved alone, as checkpoints for vectors are.
        return f"model.{name}" if name.startswith(_BODY_ROOTS) else name


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The architecture of one checkpoint.

    Attributes:
        embedding_scale: Embeddings are multiplied by it.
        final_soft_cap: Logits are capped by tanh; 0: they are not.
        has_head: Whether the output matrix is its own, not the embedding's.
        has_layer_scalars: Whether each layer's output is scaled by a stored number.
        layer_inputs: What each layer adds for its token beside attention and feed-forward, if so.
        hyper: How residual streams are mixed, if there are several.
        drafter: The layer of a block that drafts tokens from the last layer's output; None: there
            is none, or it does not run.
        drafter_skips_first: Whether the block takes zeros for an embedding at position 0.
        sees_both_ways: Whether tokens attend to those behind them, too. Prompts are computed whole,
            and a window is the distance at which tokens no longer see each other.
        images: How pictures are seen; None: they are not.
        placeholder_ids: Token ids that a wrapper replaces by what its towers make of images and
            the like, and that have no embedding of their own.
    """

    has_dspark_drafter: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerPlan, ...]
    attention: AttentionShape
    norm: NormPlan
    has_head: bool
    embedding_scale: float = 1.0
    final_soft_cap: float = 0.0
    names: TensorNames = TensorNames()
    has_layer_scalars: bool = False
    layer_inputs: LayerInputsPlan | None = None
    hyper: HyperPlan | None = None
    drafter: LayerPlan | None = None
    drafter_skips_first: bool = False
    placeholder_ids: tuple[int, ...] = ()
    sees_both_ways: bool = False
    images: ImagesPlan | None = None

    @property
    def num_nextn_predict_layers(self) -> int:
        """Blocks that draft tokens."""
        return int(self.drafter is not None)

    @property
    def ties_head(self) -> bool:
        """Whether the output matrix is the embedding's."""
        return not self.has_head

    def with_own_head(self) -> "DecoderConfig":
        """Returns the config of a checkpoint that stores an output matrix of its own."""
        return replace(self, has_head=True)

    def for_drafts(self, is_run: bool) -> "DecoderConfig":
        """Returns the config without the block that drafts, unless that runs.

        Its layer keeps keys and values of every token, which nobody would read.
        """
        return self if is_run else replace(self, drafter=None)

    def shape_of(self, layer: LayerPlan) -> AttentionShape:
        """Returns a layer's heads."""
        return self.attention if layer.attention is None else layer.attention

    def sees_pictures_both_ways(self, layer: LayerPlan) -> bool:
        """Returns whether the rows of one picture see each other both ways in a layer."""
        both_ways = "nowhere" if self.images is None else self.images.both_ways
        return both_ways == "everywhere" or (both_ways == "windows" and layer.window > 0)

    @property
    def shared_owners(self) -> frozenset[int]:
        """The layers whose keys and values others attend to."""
        return frozenset(layer.kv_owner for layer in self.layers if layer.kv_owner is not None)

    @property
    def index_owners(self) -> frozenset[int]:
        """The layers whose choice of keys others attend to, too."""
        owners = (layer.index_owner for layer in self.layers)
        return frozenset(owner for owner in owners if owner is not None)

    @property
    def last_owner(self) -> int:
        """The last layer that stores keys and values, or a state; those above need only the rows
        whose logits are read, and itself need what it stores alone of the others."""
        return max(i for i, layer in enumerate(self.layers) if layer.kv_owner is None)

    def for_ranks(self, size: int) -> "DecoderConfig":
        """Returns the config of one of ``size`` ranks, as far as caches go."""
        layers = tuple(
            replace(
                layer,
                attention=layer.attention and layer.attention.for_ranks(size),
                recurrence=layer.recurrence and layer.recurrence.for_ranks(size),
            )
            for layer in self.layers
        )
        return replace(self, attention=self.attention.for_ranks(size), layers=layers)

    def find_retention_step(self, block_size: int) -> int | None:
        """Returns of what tokens a retention interval must be a multiple; None: there is none."""
        has_checkpoints = any(layer.window or layer.recurrence for layer in self.layers)
        return block_size if has_checkpoints else None

    @property
    def recurrences(self) -> tuple[RecurrencePlan, ...]:
        """The recurrent layers' plans, in order."""
        return tuple(layer.recurrence for layer in self.layers if layer.recurrence is not None)

    def check(self) -> "DecoderConfig":
        """Returns itself.

        Raises:
            ConfigError: Sizes do not fit together.
        """
        for layer in self.layers:
            shape = self.shape_of(layer)
            if shape.num_heads % shape.num_kv_heads:
                raise ConfigError(
                    f"num_key_value_heads is {shape.num_kv_heads}: it must divide "
                    f"num_attention_heads ({shape.num_heads})"
                )
            if shape.head_dim % 2:
                raise ConfigError(f"head_dim is {shape.head_dim}: it must be even")
            for plan in (layer.feed_forward, layer.experts):
                _check_experts(plan)
            if layer.window == 1:
                raise ConfigError("sliding_window is 1: it must be at least 2")
            if layer.recurrence is not None:
                layer.recurrence.check()
        if len(set(self.recurrences)) > 1:
            raise ConfigError("recurrent layers of different shapes are not supported")
        return self


def _check_experts(plan: FeedForwardPlan | None) -> None:
    if isinstance(plan, ExpertsPlan | ClampedExpertsPlan) and plan.num_chosen > plan.num_experts:
        raise ConfigError(
            f"num_experts_per_tok is {plan.num_chosen}: it must be at most the number of "
            f"experts ({plan.num_experts})"
        )
