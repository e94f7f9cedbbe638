"""DeepSeek V3.2 and GLM 5: layers as DeepSeek V3's, to keys that an indexer chooses one by one.

The indexer turns the first values of its heads, as two halves in V3.2 and as pairs of neighbours in
GLM 5. Layers of later GLM 5 releases may have none, and attend to what the last indexer below them
chooses. Sources: arXiv:2512.02556, arXiv:2603.12201 and the releases' config.json.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import DecoderConfig, IndexerPlan
from vllm.model_executor.models.decoder.family_fields import read_layer_types
from vllm.model_executor.models.deepseek_v3 import read_scored_latents

_KINDS = ("indexed_attention", "deepseek_sparse_attention")
# Whether a layer has an indexer.
_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


def read_deepseek_v32(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a DeepseekV32ForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
        UnsupportedFeatureError: The weights are quantised in a way that is not read.
    """
    fields = FieldReader(raw)
    fields.require("model_type", "deepseek_v32", ("deepseek_v32",))
    return _read(fields, turns_pairs=False)


def read_glm_moe_dsa(raw: Mapping[str, Any]) -> DecoderConfig:
    """Reads the config.json of a GlmMoeDsaForCausalLM; raises as ``read_deepseek_v32``."""
    pattern = raw.get("index_topk_pattern")
    if isinstance(pattern, str):
        raw = {**raw, "index_topk_pattern": [_LETTERS.get(letter, letter) for letter in pattern]}
    fields = FieldReader(raw)
    fields.require("model_type", "glm_moe_dsa", ("glm_moe_dsa",))
    fields.require("indexer_rope_interleave", True, (True,))
    config = _read(fields, turns_pairs=True)
    owners = _find_index_owners(_read_indexer_types(fields))
    layers = tuple(
        replace(layer, index_owner=owner)
        for layer, owner in zip(config.layers, owners, strict=True)
    )
    # Weights that a release may hold for them all the same are read by nobody.
    unread = tuple(
        f"model.layers.{index}.self_attn.indexer."
        for index, owner in enumerate(owners)
        if owner is not None
    )
    names = replace(config.names, ignored=(*config.names.ignored, *unread))
    return replace(config, layers=layers, names=names)


def _read(fields: FieldReader, *, turns_pairs: bool) -> DecoderConfig:
    count = fields.positive_int("num_hidden_layers")
    read_layer_types(fields, [_KINDS[0]] * count, _KINDS)
    config = read_scored_latents(fields)
    latent, rope = config.attention.latent, config.layers[0].rope
    assert latent is not None, "its rows are latents"
    assert rope is not None, "its layers know positions"
    if not latent.query_rank:
        raise fields.error("q_lora_rank", None, "a number: the indexer's queries are made of it")
    head_dim = fields.positive_int("index_head_dim", 128)
    if head_dim < rope.dim:
        raise fields.error("index_head_dim", head_dim, f"at least qk_rope_head_dim ({rope.dim})")
    indexer = IndexerPlan(
        num_heads=fields.positive_int("index_n_heads", 32 if turns_pairs else 64),
        head_dim=head_dim,
        pool_size=1,
        num_chosen=fields.positive_int("index_topk", 2048),
        turns_pairs=turns_pairs,
    )
    attention = replace(config.attention, latent=replace(latent, indexer=indexer))
    return replace(config, attention=attention)


def _read_indexer_types(fields: FieldReader) -> Sequence[str]:
    """Reads which layers have an indexer: as listed, or one of so many.

    Raises:
        ConfigError: Another kind of layer, or the first has none.
    """
    count = fields.positive_int("num_hidden_layers")
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    if fields.has(name):
        kinds = [str(kind) for kind in fields.sequence(name, count)]
    else:
        name = "index_skip_topk_offset"
        every = max(1, fields.non_negative_int("index_topk_freq", 1))
        first = fields.non_negative_int(name, 2) - 1
        kinds = [_SHARED if max(index - first, 0) % every else _FULL for index in range(count)]
    for kind in kinds:
        if kind not in (_FULL, _SHARED):
            raise fields.error(name, kind, f"{_FULL} or {_SHARED}")
    if kinds[0] != _FULL:
        raise fields.error(name, kinds[0], f"{_FULL} in the first layer, below which none chooses")
    return kinds


def _find_index_owners(kinds: Sequence[str]) -> list[int | None]:
    """Returns whose indexer chooses each layer's keys; None: its own."""
    owners: list[int | None] = []
    last = 0
    for index, kind in enumerate(kinds):
        last = index if kind == _FULL else last
        owners.append(None if kind == _FULL else last)
    return owners
