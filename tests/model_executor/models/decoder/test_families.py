"""What families' config.json may and may not say; torch-free but for the last test."""

import math
from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import (
    assert_same_weights,
    build_model,
    wrap_text,
)
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    gemma3,
    gemma4,
    gpt_oss,
    kimi_linear,
    llama,
    mistral,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.model_loader.shards import WHOLE_SHARE, RankShare
from vllm.model_executor.models.decoder.config import ExpertsPlan, MlpPlan
from vllm.model_executor.models.decoder.kv_cache import decoder_kv_cache_specs
from vllm.model_executor.models.decoder.shards import find_shard
from vllm.model_executor.models.registry import resolve_model
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        # Two lists of divisors take turns there: at which length has to be said.
        (
            llama(rope_scaling={"type": "longrope", "factor": 2.0}),
            "lacks 'rope_scaling.original_max_position_embeddings'",
        ),
        (llama(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (llama(hidden_act="relu"), "'relu'"),
        (llama(num_key_value_heads=3), "num_key_value_heads is 3"),
        (llama(head_dim=15), "head_dim is 15"),
        (llama(model_type="qwen3"), "'qwen3'"),
        (mistral(sliding_window=1), "sliding_window is 1"),
        (
            mistral(sliding_window=None, layer_types=["sliding_attention"] * 3),
            "'sliding_attention'; allowed: full_attention: no window is set",
        ),
        (
            gpt_oss(experts_per_token=3),
            "'experts_per_token' is 3; allowed: 2, which num_experts_per_tok says",
        ),
        (qwen3_5(hidden_act="gelu_pytorch_tanh"), "'hidden_act' is 'gelu_pytorch_tanh'"),
        (kimi_linear(hidden_act="gelu_pytorch_tanh"), "'hidden_act' is 'gelu_pytorch_tanh'"),
        (qwen3(layer_types=["chunked_attention"] * 3), "'chunked_attention'"),
        (qwen3(layer_types=["sliding_attention"] * 3), "no window is set"),
        (qwen3_moe(num_experts_per_tok=9), "num_experts_per_tok is 9"),
        (qwen3_5(output_gate_type="tanh"), "'tanh'"),
        (qwen3_5(attn_output_gate=False), "attn_output_gate"),
        (qwen3_5(layer_types=["sliding_attention"] * 4), "'sliding_attention'"),
        (qwen3_5(linear_num_value_heads=3), "linear_num_key_heads is 2"),
        (qwen3_5(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1"),
        (qwen3_5(rope_parameters={"mrope_section": [2, 2, 1]}), "mrope_section"),
        (
            qwen3_5(
                architectures=["Qwen3_5MoeForCausalLM"],
                model_type="qwen3_5_moe_text",
                norm_topk_prob=False,
            ),
            "'norm_topk_prob' is False; allowed: True",
        ),
        (qwen3_5(rope_parameters={"partial_rotary_factor": 0.01}), "partial_rotary_factor"),
        (qwen3_5(rope_parameters={"partial_rotary_factor": 1e308}), "partial_rotary_factor"),
        (qwen3(rope_scaling={**_YARN, "factor": 1e308}), "factor' is 1e[+]308; allowed: a stretch"),
        (
            llama(rope_parameters={"rope_type": "default"}, rope_scaling=_YARN),
            "'rope_scaling.rope_type' is 'yarn'; allowed: 'default', which rope_parameters says",
        ),
        (
            llama(rope_parameters={"rope_theta": 5e5}, rope_theta=1e4),
            "'rope_theta' is 10000.0; allowed: 500000.0, which rope_parameters says",
        ),
        (
            gemma3(rope_parameters={"full_attention": {}}, rope_scaling={"type": "linear"}),
            "allowed: None, which rope_parameters.full_attention says",
        ),
        (
            gemma3(rope_parameters={"rope_type": "linear", "factor": 8.0}),
            "'rope_parameters.rope_type' is 'linear'; allowed: objects for full_attention",
        ),
        (
            llama(rope_scaling=_YARN, original_max_position_embeddings=512),
            "'original_max_position_embeddings' is 512; allowed: 2048, which",
        ),
        (
            gemma3(rope_parameters={"sliding_attention": {"rope_theta": 5e4}}, rope_scaling=None),
            "'rope_local_base_freq' is 10000.0; allowed: 50000.0, which rope_parameters says",
        ),
        (
            gemma3(rope_scaling={"sliding_attention": {"rope_theta": 5e4}}),
            "'rope_scaling.sliding_attention'",
        ),
        (gemma4(rope_scaling=_YARN), "rope_scaling"),
        (gemma4(rope_theta=5e5), "'rope_theta' is 500000.0; allowed: 1000000.0"),
        (gemma4(rope_local_base_freq=5e5), "'rope_local_base_freq' is 500000.0; allowed: 10000.0"),
        (gemma3(use_bidirectional_attention="all"), "use_bidirectional_attention"),
        (gemma3(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


@pytest.mark.parametrize("family", [llama, qwen3, gemma3, gpt_oss])
def test_weights_of_a_format_that_is_not_read_are_refused_by_name(family: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="hqq"):
        parse(family(quantization_config={"quant_method": "hqq"}))


def test_gpt_oss_refuses_packed_weights_that_others_load() -> None:
    parse(llama(quantization_config={"quant_method": "awq"}))
    with pytest.raises(UnsupportedFeatureError, match="awq"):
        parse(gpt_oss(quantization_config={"quant_method": "awq"}))


def test_windows_and_kinds_of_layers() -> None:
    assert [layer.window for layer in parse(gemma3()).layers] == [48, 48, 0, 48, 48, 0]
    assert {layer.window for layer in parse(mistral(sliding_window=None)).layers} == {0}
    some = mistral(layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert [layer.window for layer in parse(some).layers] == [40, 0, 0]
    kinds = [type(layer.feed_forward) for layer in parse(qwen3_moe()).layers]
    assert kinds == [ExpertsPlan, MlpPlan, ExpertsPlan]
    local, full = parse(gemma3()).layers[0].rope, parse(gemma3()).layers[2].rope
    assert (local.theta, local.kind, full.theta, full.factor) == (1e4, "default", 1e6, 8.0)


def test_yarn_takes_its_factor_from_the_lengths() -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    rope = parse(qwen3(rope_scaling=yarn)).layers[0].rope
    assert rope.factor == 8.0
    # Some files have the length beside the object.
    beside = qwen3(rope_scaling={"rope_type": "yarn"}, original_max_position_embeddings=512)
    assert parse(beside).layers[0].rope == rope
    assert math.isclose(rope.magnitude, 1 + 0.1 * math.log(8.0))


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", [llama, qwen3, qwen3_5])
def test_yarn_that_is_added_to_a_release_stretches_its_context(family: Any, spelling: str) -> None:
    other = {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}
    stretched = parse(family(**{**other, "max_position_embeddings": 2560, spelling: _YARN}))
    assert stretched.max_position_embeddings == 4 * 2048
    longer = parse(family(**{**other, "max_position_embeddings": 9000, spelling: _YARN}))
    assert longer.max_position_embeddings == 9000


def test_two_spellings_that_say_the_same_are_read() -> None:
    both = qwen3(
        rope_scaling={**_YARN, "mscale": None}, rope_parameters={**_YARN, "rope_theta": 1e6}
    )
    assert parse(both).layers[0].rope.factor == 4.0


def test_caches_by_layer() -> None:
    specs = decoder_kv_cache_specs(parse(gemma3()), 32, torch.float32, torch.float32)
    kinds = [type(spec) for spec in specs.values()]
    assert kinds == [SlidingWindowSpec, SlidingWindowSpec, FullAttentionSpec] * 2
    with pytest.raises(ConfigError, match="--block-size 48"):
        decoder_kv_cache_specs(parse(gemma3()), 48, torch.float32, torch.float32)


def test_every_fourth_layer_attends_where_the_file_does_not_say() -> None:
    layers = parse(qwen3_5(num_hidden_layers=8)).layers
    assert [layer.recurrence is None for layer in layers] == [False, False, False, True] * 2
    layers = parse(qwen3_5(num_hidden_layers=4, full_attention_interval=2)).layers
    assert [layer.recurrence is None for layer in layers] == [False, True] * 2
    assert layers[1].rope.dim == 8
    beside = parse(qwen3_5(rope_parameters=None, partial_rotary_factor=0.5, rope_theta=1e5))
    assert (beside.layers[3].rope.dim, beside.layers[3].rope.theta) == (16, 1e5)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "self_attn.A_log"])
def test_a_layer_that_the_config_has_not_is_left_to_the_load(name: str) -> None:
    """A file of more layers than config.json says is refused by the names of its tensors."""
    config = parse(qwen3(num_hidden_layers=2))
    find_shard(config, WHOLE_SHARE, f"model.layers.2.{name}")
    find_shard(config, RankShare(1, 2), f"model.layers.9.{name}")


def test_recurrent_layers_are_shared_out_by_key_heads() -> None:
    entry = resolve_model(["Qwen3_5ForCausalLM"])
    entry.check_ranks(parse(qwen3_5()), 2, False)
    with pytest.raises(ConfigError, match="key heads of a recurrent layer 2"):
        entry.check_ranks(parse(qwen3_5()), 4, False)


@pytest.mark.slow
def test_the_text_part_of_qwen_with_vision() -> None:
    text = qwen3_5()
    tensors = build_hf_model(text, seed=7).state_dict()
    raw, nested = wrap_text(
        text, tensors, "Qwen3_5ForConditionalGeneration", "qwen3_5", "model.language_model."
    )
    others = {
        "model.visual.patch_embed.proj.weight": torch.zeros(1),
        "mtp.fc.weight": torch.zeros(1),
    }
    assert_same_weights(build_model(raw, {**nested, **others}), build_model(text, tensors))


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_with_vision(prefix: str) -> None:
    text = gemma3()
    tensors = build_hf_model(text, seed=7).state_dict()
    raw, nested = wrap_text(text, tensors, "Gemma3ForConditionalGeneration", "gemma3", prefix)
    vision = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": torch.zeros(1),
        "model.multi_modal_projector.mm_soft_emb_norm.weight": torch.zeros(1),
    }
    model = build_model(raw, {**nested, **vision})
    expected = build_model(text, tensors)
    assert_same_weights(model, expected)
    assert model.config.layers == expected.config.layers
