"""DeepSeek-V4's architecture, read from config.json in either spelling (torch-free).

Two spellings exist: the published one (``compress_ratios``, ``num_hash_layers``, ``rope_scaling``)
and the one transformers writes (``layer_types``, ``mlp_layer_types``, ``compress_rates``,
``rope_parameters``). Both end as the same frozen ``DeepseekV4Config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.deepseek_v4.config_rope import RopeConfig, read_rope_configs

LayerKind = Literal["window", "csa", "hca", "shared"]

# In the published spelling the ratio alone tells the kinds apart: only ratio 4 overlaps and has
# an indexer.
_PUBLISHED_CSA_RATIO = 4
_PUBLISHED_HCA_RATIO = 128
_KIND_OF_LAYER_TYPE: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_MLP_LAYER_TYPES = ("hash_moe", "moe")


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer attends to besides its sliding window.

    Attributes:
        kind: "window" (nothing else), "csa" (entries of ``ratio`` overlapping tokens, chosen by
            the indexer), "hca" (every entry of ``ratio`` tokens) or "shared" (entries of ``ratio``
            tokens, chosen; they and the choice may be another layer's, see ``deepseek_v41``).
        ratio: Tokens per compressed entry; 0 for "window".
        hash_routed: Experts are looked up by token id instead of scored.
    """

    kind: LayerKind
    ratio: int
    hash_routed: bool


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """What DeepSeek-V4 and V4.1 have in common.

    Attributes:
        norms_heads: Whether each head of a query is normed.
        layers: One plan per main layer.
        num_nextn_predict_layers: 1 with a classic MTP block, else 0 (also for a DSpark drafter).
        has_dspark_drafter: The checkpoint's ``mtp.*`` tensors are a DSpark drafter, which is not
            served; the main model is.
        main_rope: Rotary settings of window-only layers and the MTP block.
        compress_rope: Rotary settings of layers with a compressor.
    """

    norms_heads: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layers: tuple[LayerPlan, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    main_rope: RopeConfig
    compress_rope: RopeConfig
    max_position_embeddings: int
    num_nextn_predict_layers: int
    has_dspark_drafter: bool
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_id: int

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Token ids that stand for images, which prompts cannot have."""
        return ()

    @property
    def num_hidden_layers(self) -> int:
        """Main layers, the MTP block not counted."""
        return len(self.layers)

    @property
    def ties_head(self) -> bool:
        """Whether the output matrix is the embedding's."""
        return self.tie_word_embeddings

    def with_own_head(self) -> Self:
        """Returns the config of a checkpoint that stores an output matrix of its own."""
        return replace(self, tie_word_embeddings=False)

    def for_drafts(self, is_run: bool) -> Self:
        """Returns itself: the rows of the block that drafts are few, whether it runs or not."""
        del is_run
        return self

    def find_retention_step(self, block_size: int) -> int | None:
        """Returns of what tokens a retention interval must be a multiple."""
        return block_size


@dataclass(frozen=True, slots=True)
class DeepseekV4Config(LatentConfig):
    """The architecture of one checkpoint; see the module docstring."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DeepseekV4Config":
        """Reads a parsed config.json.

        Raises:
            UnsupportedModelError: It describes DeepSeek-V4.1 under V4's name.
            ConfigError: A field is missing, of the wrong type, or not one we serve; the message
                names the field, its value and what is allowed.
        """
        fields = FieldReader(raw)
        _refuse_v41(raw)
        _check_fixed_choices(fields)
        head_dim = fields.positive_int("head_dim", 512)
        rope_dim = _read_rope_dim(fields, head_dim)
        main_rope, compress_rope = read_rope_configs(fields)
        dspark_keys = sorted(key for key in raw if key.startswith("dspark_"))
        config = cls(
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=fields.positive_int("hidden_size"),
            num_attention_heads=fields.positive_int("num_attention_heads"),
            head_dim=head_dim,
            qk_rope_head_dim=rope_dim,
            q_lora_rank=fields.positive_int("q_lora_rank"),
            o_groups=fields.positive_int("o_groups"),
            o_lora_rank=fields.positive_int("o_lora_rank"),
            sliding_window=fields.positive_int("sliding_window", 128),
            layers=_read_layers(fields),
            index_n_heads=fields.positive_int("index_n_heads", 64),
            index_head_dim=fields.positive_int("index_head_dim", 128),
            index_topk=fields.positive_int("index_topk", 512),
            n_routed_experts=fields.positive_int("n_routed_experts"),
            num_experts_per_tok=fields.positive_int("num_experts_per_tok"),
            moe_intermediate_size=fields.positive_int("moe_intermediate_size"),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.5),
            swiglu_limit=fields.number("swiglu_limit", 10.0),
            hc_mult=fields.positive_int("hc_mult", 4),
            hc_sinkhorn_iters=fields.positive_int("hc_sinkhorn_iters", 20),
            hc_eps=fields.number("hc_eps", 1e-6),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            main_rope=main_rope,
            compress_rope=compress_rope,
            max_position_embeddings=fields.positive_int("max_position_embeddings"),
            num_nextn_predict_layers=0 if dspark_keys else _read_num_mtp_layers(fields),
            has_dspark_drafter=bool(dspark_keys),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            bos_token_id=fields.token_id("bos_token_id", 0),
            eos_token_id=fields.token_id("eos_token_id", 1),
        )
        check_shapes(config)
        return config


def _refuse_v41(raw: Mapping[str, Any]) -> None:
    """Refuses DeepSeek-V4.1 under V4's name: layers compressed by 1 or 2, and tables."""
    ratios = raw.get("compress_ratios")
    low = {1, 2}.intersection(ratios) if isinstance(ratios, list) and _are_ints(ratios) else set()
    tables = [key for key in raw if "engram" in key.lower()]
    if tables or low:
        found = f"has '{tables[0]}'" if tables else f"'compress_ratios' is {min(low)}"
        raise UnsupportedModelError(
            f"config.json: {found}; allowed: 0 (window only), 4, or a ratio above 2, and no engram "
            "tables. DeepSeek-V4.1, which has such layers, is another architecture, whose "
            "config.json says DeepseekV41ForCausalLM and deepseek_v41."
        )


def _are_ints(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _check_fixed_choices(fields: FieldReader) -> None:
    """Refuses variants of the architecture whose maths we do not have."""
    fields.require("model_type", "deepseek_v4", ("deepseek_v4",))
    fields.require("num_key_value_heads", 1, (1,))
    fields.require("n_shared_experts", 1, (1,))
    fields.require("scoring_func", "sqrtsoftplus", ("sqrtsoftplus",))
    fields.require("topk_method", "noaux_tc", ("noaux_tc",))
    fields.require("norm_topk_prob", True, (True,))
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("attention_bias", False, (False,))
    fields.require("mlp_bias", False, (False,))


def _read_rope_dim(fields: FieldReader, head_dim: int) -> int:
    if fields.has("qk_rope_head_dim"):
        return fields.positive_int("qk_rope_head_dim")
    if fields.has("partial_rotary_factor"):
        return int(head_dim * fields.number("partial_rotary_factor"))
    return 64


def _read_num_mtp_layers(fields: FieldReader) -> int:
    num_layers = fields.non_negative_int("num_nextn_predict_layers", 0)
    if num_layers > 1:
        raise fields.error("num_nextn_predict_layers", num_layers, "0 or 1 MTP block")
    return num_layers


def _read_layers(fields: FieldReader) -> tuple[LayerPlan, ...]:
    num_layers = fields.positive_int("num_hidden_layers")
    if fields.has("layer_types"):
        kinds = _read_transformers_kinds(fields, num_layers)
    elif fields.has("compress_ratios"):
        kinds = _read_published_kinds(fields, num_layers)
    else:
        raise ConfigError(
            "config.json has neither 'compress_ratios' nor 'layer_types': one of them must give "
            f"the attention kind of each of the {num_layers} layers"
        )
    hashed = _read_hash_routed(fields, num_layers)
    hca_ratios = sorted({ratio for kind, ratio in kinds if kind == "hca"})
    if len(hca_ratios) > 1:
        raise fields.error("compress_ratios", hca_ratios, "one ratio besides 0 and 4 per model")
    return tuple(
        LayerPlan(kind, ratio, is_hashed)
        for (kind, ratio), is_hashed in zip(kinds, hashed, strict=True)
    )


def _read_transformers_kinds(fields: FieldReader, num_layers: int) -> list[tuple[LayerKind, int]]:
    rates = _read_compress_rates(fields)
    kinds: list[tuple[LayerKind, int]] = []
    for name in fields.sequence("layer_types", num_layers):
        if name not in _KIND_OF_LAYER_TYPE:
            raise fields.error("layer_types", name, f"one of {', '.join(_KIND_OF_LAYER_TYPE)}")
        kind = _KIND_OF_LAYER_TYPE[name]
        kinds.append((kind, rates[kind]))
    return kinds


def _read_compress_rates(fields: FieldReader) -> dict[LayerKind, int]:
    rates: dict[LayerKind, int] = {
        "window": 0,
        "csa": _PUBLISHED_CSA_RATIO,
        "hca": _PUBLISHED_HCA_RATIO,
    }
    for name, value in fields.mapping("compress_rates").items():
        if name not in _KIND_OF_LAYER_TYPE or not isinstance(value, int) or value < 2:
            raise fields.error(
                "compress_rates",
                {name: value},
                "compressed_sparse_attention and heavily_compressed_attention, each at least 2",
            )
        rates[_KIND_OF_LAYER_TYPE[name]] = value
    return rates


def _read_published_kinds(fields: FieldReader, num_layers: int) -> list[tuple[LayerKind, int]]:
    # The list may be longer than the main layers: MTP and DSpark blocks have entries too.
    kinds: list[tuple[LayerKind, int]] = []
    rates = _read_compress_rates(fields) if fields.has("compress_rates") else None
    for ratio in fields.sequence("compress_ratios", num_layers):
        if isinstance(ratio, bool) or not isinstance(ratio, int) or ratio < 0 or ratio == 1:
            raise fields.error("compress_ratios", ratio, "0 (window only), 4, or a ratio above 1")
        kind: LayerKind = (
            "window" if ratio == 0 else "csa" if ratio == _PUBLISHED_CSA_RATIO else "hca"
        )
        kinds.append((kind, rates[kind] if rates is not None else ratio))
    return kinds


def _read_hash_routed(fields: FieldReader, num_layers: int) -> list[bool]:
    if fields.has("mlp_layer_types"):
        names = fields.sequence("mlp_layer_types", num_layers)
        for name in names:
            if name not in _MLP_LAYER_TYPES:
                raise fields.error("mlp_layer_types", name, "one of hash_moe, moe")
        return [name == "hash_moe" for name in names]
    num_hash_layers = fields.non_negative_int("num_hash_layers", 3)
    return [index < num_hash_layers for index in range(num_layers)]


def check_shapes(config: LatentConfig) -> None:
    """Raises ConfigError for sizes that do not fit together."""
    heads, groups = config.num_attention_heads, config.o_groups
    if heads % groups:
        raise ConfigError(f"o_groups is {groups}, which must divide num_attention_heads ({heads})")
    for name, size in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        # The rotary part is the tail of each head and is turned in pairs.
        if config.qk_rope_head_dim > size or size % 2:
            raise ConfigError(
                f"{name} is {size}: it must be even and at least qk_rope_head_dim "
                f"({config.qk_rope_head_dim})"
            )
    if config.qk_rope_head_dim % 2:
        raise ConfigError(f"qk_rope_head_dim is {config.qk_rope_head_dim}: it must be even")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"num_experts_per_tok is {config.num_experts_per_tok}: it must be at most "
            f"n_routed_experts ({config.n_routed_experts})"
        )
    if config.sliding_window < 2:
        raise ConfigError(f"sliding_window is {config.sliding_window}: it must be at least 2")
