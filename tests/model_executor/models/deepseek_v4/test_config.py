"""Both config spellings, and every refusal naming field, value and what is allowed."""

from typing import Any

import pytest

from tests.model_executor.models.hf_reference import (
    YARN,
    sixteen_rate,
    transformers_spelling,
)
from tests.model_executor.models.tiny_config import tiny_config
from vllm.exceptions import ConfigError
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config, LayerPlan


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rope_scaling": YARN, "num_hash_layers": 3, "num_nextn_predict_layers": 1},
        {"hc_mult": 2, "compress_ratios": [128, 128, 4, 0], "compress_rope_theta": 5e4},
    ],
)
def test_both_spellings_read_alike(overrides: dict[str, Any]) -> None:
    published = tiny_config(**overrides)
    spelled = transformers_spelling(published)
    assert "compress_ratios" not in spelled
    assert DeepseekV4Config.from_dict(spelled) == DeepseekV4Config.from_dict(published)


def test_schedule_of_flash() -> None:
    ratios = [0, 0, *[4, 128] * 20, 4, 0]
    config = DeepseekV4Config.from_dict(
        tiny_config(num_hidden_layers=43, compress_ratios=ratios, num_hash_layers=3)
    )
    assert [plan.ratio for plan in config.layers] == ratios[:43]
    assert config.layers[0] == LayerPlan("window", 0, True)
    assert config.layers[2] == LayerPlan("csa", 4, True)
    assert config.layers[3] == LayerPlan("hca", 128, False)


def test_transformers_rates() -> None:
    config = DeepseekV4Config.from_dict(sixteen_rate(tiny_config()))
    assert [plan.ratio for plan in config.layers] == [0, 4, 16, 4]
    raw = tiny_config()
    raw["compress_rates"] = {"heavily_compressed_attention": 16}
    assert [plan.ratio for plan in DeepseekV4Config.from_dict(raw).layers] == [0, 4, 16, 4]


def test_yarn_concerns_compressed_layers_only() -> None:
    config = DeepseekV4Config.from_dict(tiny_config(rope_scaling=YARN))
    assert config.main_rope.yarn is None
    assert config.compress_rope.yarn is not None
    assert config.compress_rope.yarn.original_max_position_embeddings == 256


def test_dspark_serves_the_main_model_only() -> None:
    config = DeepseekV4Config.from_dict(
        tiny_config(
            compress_ratios=[0, 4, 128, 4, 0, 0, 0],
            num_nextn_predict_layers=3,
            dspark_target_layer_ids=[1, 2],
            dspark_markov_rank=256,
        )
    )
    assert config.has_dspark_drafter
    assert config.num_nextn_predict_layers == 0
    assert config.num_hidden_layers == 4


def test_rope_width_from_the_partial_factor() -> None:
    raw = tiny_config(partial_rotary_factor=0.5)
    del raw["qk_rope_head_dim"]
    assert DeepseekV4Config.from_dict(raw).qk_rope_head_dim == 8


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", None, "lacks 'hidden_size'"),
        ("hidden_size", "48", r"'hidden_size' is '48'; allowed: an integer of at least 1"),
        ("hc_mult", 0, r"'hc_mult' is 0"),
        ("hc_mult", True, r"'hc_mult' is True"),
        ("rms_norm_eps", -1, r"'rms_norm_eps' is -1; allowed: a positive number"),
        ("num_nextn_predict_layers", 2, r"is 2; allowed: 0 or 1 MTP block"),
        ("num_key_value_heads", 2, r"'num_key_value_heads' is 2; allowed: 1"),
        ("n_shared_experts", 2, r"'n_shared_experts' is 2; allowed: 1"),
        ("scoring_func", "softmax", r"'softmax'; allowed: 'sqrtsoftplus'"),
        ("compress_ratios", [0, 4], r"at least 4 items"),
        ("compress_ratios", [0, 4, 1, 4], r"is 1; allowed: 0"),
        ("compress_ratios", [0, 16, 128, 4], r"is \[16, 128\]"),
        ("compress_ratios", None, "neither 'compress_ratios' nor 'layer_types'"),
        ("layer_types", ["full_attention"] * 4, "'full_attention'; allowed: one of sliding"),
        ("mlp_layer_types", ["dense"] * 4, "'dense'; allowed: one of hash_moe"),
        ("compress_rates", {"compressed_sparse_attention": 1}, "each at least 2"),
        (
            "rope_scaling",
            {"type": "linear"},
            r"'rope_scaling.type' is 'linear'; allowed: 'default'",
        ),
        ("rope_scaling", {"type": "yarn"}, r"lacks 'rope_scaling.factor'"),
        ("rope_scaling", 7, r"'rope_scaling' is 7; allowed: an object"),
        ("o_groups", 3, "o_groups is 3, which must divide"),
        ("head_dim", 4, "head_dim is 4: it must be even and at least"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim is 7"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9"),
        ("sliding_window", 1, "sliding_window is 1"),
        ("tie_word_embeddings", "no", "allowed: true or false"),
        ("eos_token_id", -1, "a token id of at least 0"),
    ],
)
def test_nonsense_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepseekV4Config.from_dict({**tiny_config(), field: value})


def test_a_list_of_eos_ids_reads_as_its_first() -> None:
    assert DeepseekV4Config.from_dict(tiny_config(eos_token_id=[7, 8])).eos_token_id == 7
