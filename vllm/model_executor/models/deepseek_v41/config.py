"""DeepSeek-V4.1's architecture, read from config.json (torch-free).

The text's fields are nested in ``text_config``, or stand at the top. Unlike DeepSeek-V4's,
``compress_ratios`` says whose entries a layer reads, not that it makes some:

    ratio           0 0 2 2 2 2 2 2 2 ... 1 1 1 1 1 ...    0: a window alone
    kv source           2           8     20               makes entries and index keys
    index source        2           8     20      24       chooses, for the layers up to the next
    candidates                            names   within   what later choices are made of
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import override

from vllm.exceptions import ConfigError
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.deepseek_v4.config import LatentConfig, LayerPlan, check_shapes
from vllm.model_executor.models.deepseek_v4.config_rope import read_rope_configs
from vllm.model_executor.models.deepseek_v41.ngram_plan import NgramPlan

# Smaller than any square that is worth a norm: a zero row stays zero.
_NORM_EPS = 1e-20
_TOP_FIELDS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "image_token_id")


@dataclass(frozen=True, slots=True)
class SharedLayerPlan(LayerPlan):
    """What one layer attends to besides its window, and whose it is.

    Attributes:
        source: The layer that makes the entries it attends; itself, perhaps. -1: none.
        chooser: The layer whose indexer chooses among them; likewise.
        candidates: "names": its choice also says which blocks later indexers choose of; "within":
            it chooses of those; "": of all.
    """

    source: int = -1
    chooser: int = -1
    candidates: Literal["", "names", "within"] = ""


@dataclass(frozen=True, slots=True)
class DeepseekV41Config(LatentConfig):
    """The architecture of one checkpoint; see the module docstring.

    Attributes:
        candidate_topk_blocks: Blocks of entries that the candidates are.
        candidate_block_size: Entries of one.
        ngrams: The tables by n-grams; None: there are none.
        image_token_id: Stands for images, which are not served.
    """

    norms_heads: ClassVar[bool] = False

    layers: tuple[SharedLayerPlan, ...]
    candidate_topk_blocks: int
    candidate_block_size: int
    ngrams: NgramPlan | None
    image_token_id: int | None

    @property
    @override
    def placeholder_ids(self) -> tuple[int, ...]:
        return () if self.image_token_id is None else (self.image_token_id,)

    def names_candidates(self, source: int) -> bool:
        """Whether choices among a layer's entries are made of candidates, in some layers."""
        return any(plan.source == source and plan.candidates for plan in self.layers)

    @property
    def cut(self) -> int:
        """The last layer that makes entries: above it only a prompt's end is needed."""
        return max((plan.source for plan in self.layers), default=-1)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DeepseekV41Config":
        """Reads a parsed config.json.

        Raises:
            ConfigError: A field is missing, of the wrong type, or not one we serve; the message
                names the field, its value and what is allowed.
        """
        fields, top = FieldReader(raw), FieldReader(raw)
        top.require("model_type", "deepseek_v41", ("deepseek_v41", "deepseek_v41_text"))
        if top.has("text_config"):
            text = top.mapping("text_config")
            inherited = {name: raw[name] for name in _TOP_FIELDS if raw.get(name) is not None}
            fields = FieldReader({**text, **inherited}, "text_config.")
            fields.require("model_type", "deepseek_v41_text", ("deepseek_v41_text",))
        _check_fixed_choices(fields)
        main_rope, compress_rope = read_rope_configs(fields)
        layers = _read_layers(fields)
        config = cls(
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=fields.positive_int("hidden_size"),
            num_attention_heads=fields.positive_int("num_attention_heads"),
            head_dim=fields.positive_int("head_dim", 512),
            qk_rope_head_dim=fields.positive_int("qk_rope_head_dim", 64),
            q_lora_rank=fields.positive_int("q_lora_rank"),
            o_groups=fields.positive_int("o_groups"),
            o_lora_rank=fields.positive_int("o_lora_rank"),
            sliding_window=fields.positive_int("sliding_window", 128),
            layers=layers,
            index_n_heads=fields.positive_int("index_n_heads", 32),
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
            rms_norm_eps=fields.number("rms_norm_eps", _NORM_EPS),
            main_rope=main_rope,
            compress_rope=compress_rope,
            max_position_embeddings=fields.positive_int("max_position_embeddings"),
            # Its mtp.* tensors are a DSpark drafter.
            num_nextn_predict_layers=0,
            has_dspark_drafter=True,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            bos_token_id=fields.token_id("bos_token_id", 0),
            eos_token_id=fields.token_id("eos_token_id", 1),
            candidate_topk_blocks=fields.positive_int("candidate_topk_blocks", 2048),
            candidate_block_size=fields.positive_int("candidate_block_size", 8),
            ngrams=_read_ngrams(fields, len(layers)),
            image_token_id=(
                fields.token_id("image_token_id", 0) if fields.has("image_token_id") else None
            ),
        )
        check_shapes(config)
        return config


def _check_fixed_choices(fields: FieldReader) -> None:
    """Refuses variants of the architecture whose maths we do not have."""
    fields.require("num_key_value_heads", 1, (1,))
    fields.require("n_shared_experts", 1, (1,))
    fields.require("scoring_func", "sqrtsoftplus", ("sqrtsoftplus",))
    fields.require("topk_method", "noaux_tc", ("noaux_tc",))
    fields.require("norm_topk_prob", True, (True,))
    fields.require("hidden_act", "silu", ("silu",))
    fields.require("attention_bias", False, (False,))
    fields.require("mlp_bias", False, (False,))
    fields.require("num_hash_layers", 0, (0,))
    fields.require("gate_temp", 1.0, (1.0,))


def _read_layers(fields: FieldReader) -> tuple[SharedLayerPlan, ...]:
    num_layers = fields.positive_int("num_hidden_layers")
    # The list is longer than the main layers: blocks that draft have entries too.
    ratios = fields.sequence("compress_ratios", num_layers)
    for ratio in ratios:
        if type(ratio) is not int or ratio < 0:
            raise fields.error("compress_ratios", ratio, "0 (window only) or a ratio of at least 1")
    sources = _read_layer_ids(fields, "kv_source_layer_ids", num_layers)
    choosers = _read_layer_ids(fields, "index_source_layer_ids", num_layers)
    if not set(sources) <= set(choosers):
        raise fields.error(
            "index_source_layer_ids", list(choosers), f"all of kv_source_layer_ids {list(sources)}"
        )
    named = -1
    if fields.has("candidate_source_layer_id"):
        named = fields.non_negative_int("candidate_source_layer_id")
        if named not in choosers:
            raise fields.error(
                "candidate_source_layer_id", named, f"one of index_source_layer_ids {choosers}"
            )
    plans = []
    for layer, ratio in enumerate(ratios):
        if not ratio:
            if layer in choosers:
                raise fields.error("index_source_layer_ids", layer, "layers with a compress ratio")
            plans.append(SharedLayerPlan("window", 0, hash_routed=False))
            continue
        source, chooser = _find_last(sources, layer), _find_last(choosers, layer)
        if source < 0 or ratios[source] != ratio:
            raise fields.error(
                "compress_ratios",
                ratio,
                f"that of the entries that layer {layer} reads, which kv_source_layer_ids "
                f"{list(sources)} says are made in a layer up to it",
            )
        plans.append(
            SharedLayerPlan(
                "shared",
                ratio,
                hash_routed=False,
                source=source,
                chooser=chooser,
                candidates=_find_candidates(fields, named, layer, chooser, source, sources),
            )
        )
    return tuple(plans)


def _find_candidates(
    fields: FieldReader,
    named: int,
    layer: int,
    chooser: int,
    source: int,
    sources: Sequence[int],
) -> Literal["", "names", "within"]:
    """Returns how a layer's choice stands to the candidates that layer ``named`` names."""
    if named < 0 or layer < named or named == chooser < layer:
        return ""
    if source != _find_last(sources, named):
        raise fields.error(
            "candidate_source_layer_id", named, f"a layer whose entries layer {layer} reads too"
        )
    return "names" if layer == named else "within"


def _read_layer_ids(fields: FieldReader, name: str, num_layers: int) -> tuple[int, ...]:
    found = fields.int_list(name)
    if list(found) != sorted(set(found)) or any(not 0 <= layer < num_layers for layer in found):
        raise fields.error(name, list(found), f"ascending layers below {num_layers}")
    return found


def _find_last(ids: Sequence[int], layer: int) -> int:
    """Returns the greatest of the ids up to a layer; -1: there is none."""
    at = bisect_right(ids, layer)
    return ids[at - 1] if at else -1


def _read_ngrams(fields: FieldReader, num_layers: int) -> NgramPlan | None:
    layer_ids = _read_layer_ids(fields, "engram_layer_ids", num_layers)
    if not layer_ids:
        return None
    plan = NgramPlan(
        layer_ids=layer_ids,
        longest=fields.positive_int("engram_max_ngram_size", 4),
        num_heads=fields.positive_int("engram_n_heads", 8),
        row_width=fields.positive_int("engram_head_dim", 256),
        least_rows=fields.positive_int("engram_vocab_size", 16_000_000),
        pad_token_id=fields.token_id("engram_pad_token_id", 2),
        num_folded=fields.positive_int("engram_compressed_vocab_size"),
    )
    if plan.longest < 2:
        raise fields.error("engram_max_ngram_size", plan.longest, "at least 2")
    vocab_size = fields.positive_int("vocab_size")
    if plan.pad_token_id >= vocab_size:
        raise fields.error("engram_pad_token_id", plan.pad_token_id, f"below {vocab_size}")
    if plan.num_folded > vocab_size:
        raise fields.error("engram_compressed_vocab_size", plan.num_folded, f"up to {vocab_size}")
    heights = [plan.count_rows(table) for table in range(len(layer_ids))]
    if fields.has("engram_num_embeddings"):
        stated = list(fields.int_list("engram_num_embeddings"))
        if stated != heights:
            raise ConfigError(
                f"config.json: 'engram_num_embeddings' is {stated}, but the heads' primes sum to "
                f"{heights}: rows would be looked up in the wrong places"
            )
    return plan
