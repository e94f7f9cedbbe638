"""Configs of Gemma 4 that nobody wrote on purpose: an error that names a field, or a model."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model_executor.models.decoder.reference import gemma4, gemma4_moe, gemma4_small
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.decoder.step import find_frequencies
from vllm.model_executor.models.gemma4_assistant import read_assistant
from vllm.model_executor.models.registry import resolve_model

LOCAL, FULL = "sliding_attention", "full_attention"
BASES = (gemma4(), gemma4_small(), gemma4_moe())
WRAPPERS = (
    ("Gemma4ForConditionalGeneration", "gemma4"),
    ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
)
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([0.0, 0.25, -1.5, 1e308, 10**400, float("nan"), 1 << 60]),
    st.sampled_from(["", "none", "silu", FULL, "all", "vision"]),
    st.just([]),
    st.just({}),
    st.lists(st.sampled_from([LOCAL, FULL, "x", 3, None]), max_size=9),
)
_HEADS = st.dictionaries(
    st.sampled_from(["head_dim", "num_key_value_heads", "x"]), _ODD, max_size=2
)
_ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "partial_rotary_factor", "factor", "type"]),
    _ODD | st.sampled_from(["default", "proportional", "linear", "yarn", "llama3", "divided"]),
    max_size=4,
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(sorted({name for base in BASES for name in base} - {"architectures"}), _ODD),
    "layer_types": st.lists(st.sampled_from([LOCAL, FULL]), min_size=5, max_size=9) | _ODD,
    "per_layer_config": st.dictionaries(
        st.sampled_from(["0", "3", "5", "7", "8", "-1", "x", ""]), _HEADS | _ODD, max_size=3
    )
    | _ODD,
    "rope_parameters": st.dictionaries(st.sampled_from([LOCAL, FULL]), _ROPE | _ODD) | _ODD,
    "num_kv_shared_layers": st.integers(-1, 9) | _ODD,
    "global_head_dim": st.sampled_from([16, 32, 15]) | _ODD,
    "num_global_key_value_heads": st.integers(0, 4) | _ODD,
    "attention_k_eq_v": st.booleans() | _ODD,
    "rms_norm_eps": _ODD,
    "use_bidirectional_attention": _ODD,
    "quantization_config": st.dictionaries(st.just("quant_method"), _ODD) | _ODD,
    "text_config": _ODD,
    "vision_config": st.just({"hidden_size": 8}) | _ODD,
    "tie_word_embeddings": _ODD,
}


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


def check(raw: dict[str, Any]) -> bool:
    """Hold that a config is refused by a field's name or makes sense; whether it does."""
    refusal = ""
    try:
        config = parse(raw)
    except (ConfigError, UnsupportedFeatureError) as error:
        refusal = str(error)
    if refusal:
        assert any(name in refusal for name in (*_FIELDS, "num_experts", "quantised")), refusal
        return False
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    assert len(specs) == sum(layer.kv_owner is None for layer in config.layers)
    for layer in config.layers:
        shape = config.shape_of(layer)
        if layer.rope is not None and shape.head_dim <= 4096:
            assert find_frequencies(layer.rope, torch.device("cpu")).isfinite().all()
        if layer.kv_owner is not None:
            owner = config.layers[layer.kv_owner]
            assert (owner.kv_owner, owner.window) == (None, layer.window)
            assert config.shape_of(owner).head_dim == shape.head_dim
            assert config.shape_of(owner).num_kv_heads == shape.num_kv_heads
    return True


@settings(
    max_examples=200, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    base=st.sampled_from(BASES),
    changes=st.dictionaries(
        st.sampled_from(sorted(_FIELDS)), st.none(), min_size=1, max_size=3
    ).flatmap(lambda names: st.fixed_dictionaries({name: _FIELDS[name] for name in names})),
)
def test_a_config_is_refused_by_field_or_served(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    raw = {**base, **changes}
    check(raw)
    for architecture, model_type in WRAPPERS:
        text = {name: value for name, value in raw.items() if name != "architectures"}
        text["model_type"] = changes.get("model_type", "gemma4_text")
        wrapped = {"architectures": [architecture], "model_type": model_type, "text_config": text}
        check(wrapped)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    outer=st.dictionaries(
        st.sampled_from(
            ["num_centroids", "use_ordered_embeddings", "backbone_hidden_size", "text_config"]
        ),
        _ODD,
        max_size=2,
    ),
    inner=st.dictionaries(
        st.sampled_from(["vocab_size", "layer_types", "num_hidden_layers", "head_dim"]),
        _ODD,
        max_size=2,
    ),
)
def test_an_assistants_config_likewise(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    raw = {"model_type": "gemma4_assistant", "text_config": inner, **outer}
    refusal = ""
    try:
        read_assistant(raw)
    except ConfigError as error:
        refusal = str(error)
    assert not refusal or any(name in refusal for name in (*raw, *inner, "head_dim")), refusal


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (gemma4(layer_types=[LOCAL] * 7), "'layer_types' is '7 names'.*num_hidden_layers"),
        (
            gemma4(per_layer_config={"5": {"head_dim": 16}}),
            r"per_layer_config\.5\.head_dim.*is 16.*32, which global_head_dim says",
        ),
        (
            gemma4(per_layer_config={"5": {"num_key_value_heads": 2}}),
            r"per_layer_config\.5\.num_key_value_heads.*1, which num_global_key_value_heads says",
        ),
        (
            gemma4_small(per_layer_config={"6": {"head_dim": 32}}),
            r"per_layer_config\.6\.head_dim.*16: the layer shares.*layer 4",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "vision_config": {"a": 1}},
            "text_config.*towers",
        ),
        (gemma4(hidden_size=10**400), "hidden_size"),
        (gemma4(num_hidden_layers=10**9), "num_hidden_layers.*at most"),
    ],
)
def test_contradictions_name_the_field(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


def test_equal_words_in_both_spellings_are_no_contradiction() -> None:
    both = gemma4(per_layer_config={"5": {"head_dim": 32, "num_key_value_heads": 1}})
    assert parse(both) == parse(gemma4())
