"""Kimi Linear: decays by channel, latent attention, experts by sigmoids in groups."""

from typing import Any

import pytest
import torch

from tests.model_executor.models.decoder.building import assert_same_weights, build_model
from tests.model_executor.models.decoder.recurrent_checks import (
    LENGTH,
    Case,
    check_1500_tokens,
    check_batches_with_rejected_drafts,
    check_every_length,
    check_every_state,
    check_unread_rows,
    make_case,
)
from tests.model_executor.models.decoder.reference import (
    config_as_saved,
    kimi_linear,
    published_tensors,
)
from vllm.exceptions import ConfigError, UnsupportedFeatureError
from vllm.model_executor.models.decoder.kv_cache import STATES, decoder_kv_cache_specs
from vllm.model_executor.models.registry import resolve_model
from vllm.native.loader import load_library
from vllm.v1.kv_cache_interface import RecurrentStateSpec

# Threads of the native kernels; 0: torch.
PATHS = [0, 2] if load_library() else [0]


def linear_config(**overrides: Any) -> dict[str, Any]:
    return {**kimi_linear()["linear_attn_config"], **overrides}


CONFIGS: dict[str, dict[str, Any]] = {
    # Its last layer is recurrent, as no release's is.
    "one group": kimi_linear(),
    # Its last layer is one of attention, as that of the 48B.
    "groups": kimi_linear(
        num_hidden_layers=3,
        num_expert_group=4,
        topk_group=2,
        num_experts_per_token=3,
        num_shared_experts=2,
        moe_renormalize=False,
        linear_attn_config={
            "full_attn_layers": [2, 3],
            "kda_layers": [1],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(CONFIGS[request.param])


def parse(raw: dict[str, Any]) -> Any:
    return resolve_model(raw["architectures"]).parse_config(raw)


@pytest.mark.slow
def test_both_spellings_of_the_config_are_one_model(case: Case) -> None:
    saved = {**config_as_saved(case.reference), "architectures": case.raw["architectures"]}
    assert parse(saved) == case.model.config
    nested = saved.pop("linear_attn_config")
    assert "linear_head_dim" in saved
    assert nested["head_dim"] == saved["linear_head_dim"]
    assert parse(saved) == case.model.config


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
@pytest.mark.parametrize("chunk", [LENGTH, 1, 7, 64])
def test_every_length_up_to_300(case: Case, chunk: int, native: int) -> None:
    check_every_length(case, chunk, native)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_1500_tokens(case: Case, native: int) -> None:
    check_1500_tokens(case, native)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block_size", "packed", "native"), [(16, False, 0), (64, True, 0), (32, True, PATHS[-1])]
)
def test_batches_with_rejected_drafts(
    case: Case, block_size: int, packed: bool, native: int
) -> None:
    check_batches_with_rejected_drafts(case, block_size, packed, native)


@pytest.mark.slow
def test_unread_rows_need_not_be_computed(case: Case) -> None:
    check_unread_rows(case)


@pytest.mark.slow
@pytest.mark.parametrize("native", PATHS)
def test_every_state_that_a_chunk_leaves_can_be_resumed_from(case: Case, native: int) -> None:
    check_every_state(case, native)


@pytest.mark.slow
def test_names_of_releases_and_of_transformers_are_one_model(case: Case) -> None:
    saved = published_tensors(case.reference)
    renamed = {
        name.replace("block_sparse_moe", "mlp")
        if "moe.gate_proj" in name or "moe.up_proj" in name or "moe.down_proj" in name
        else name: tensor
        for name, tensor in saved.items()
    }
    assert "model.layers.0.mlp.gate_proj.weight" in renamed
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in saved
    assert_same_weights(build_model(case.raw, renamed), case.model)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (kimi_linear(model_type="kimi"), "'kimi'"),
        (kimi_linear(q_lora_rank=16), "q_lora_rank"),
        (kimi_linear(mla_use_nope=False), "mla_use_nope"),
        (kimi_linear(moe_router_activation_func="softmax"), "moe_router_activation_func"),
        (kimi_linear(moe_layer_freq=2), "moe_layer_freq"),
        (kimi_linear(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
        (kimi_linear(attention_bias=True), "attention_bias"),
        (kimi_linear(tie_word_embeddings=True), "tie_word_embeddings"),
        (kimi_linear(num_key_value_heads=2), "num_key_value_heads"),
        (kimi_linear(qk_rope_head_dim=7), "qk_rope_head_dim"),
        (kimi_linear(hidden_act="relu"), "'relu'"),
        (kimi_linear(num_expert_group=3), "num_expert_group"),
        (kimi_linear(num_expert_group=8), "num_expert_group"),
        (kimi_linear(topk_group=2), "topk_group"),
        (kimi_linear(num_expert_group=4, num_experts_per_token=3), "num_experts_per_token"),
        (kimi_linear(layer_types=["sliding_attention"] * 5), "'sliding_attention'"),
        (kimi_linear(mlp_layer_types=["wide"] * 5), "'wide'"),
        (kimi_linear(linear_attn_config=linear_config(kda_layers=[1, 2, 5])), "full_attn_layers"),
        (kimi_linear(linear_attn_config=linear_config(full_attn_layers=[3])), "full_attn_layers"),
        (
            kimi_linear(
                linear_attn_config=linear_config(full_attn_layers=[], kda_layers=[1, 2, 3, 4, 5])
            ),
            "full_attn_layers",
        ),
        (
            kimi_linear(
                linear_attn_config=linear_config(full_attn_layers=[1, 2, 3, 4, 5], kda_layers=[])
            ),
            "kda_layers",
        ),
        (
            kimi_linear(linear_attn_config=linear_config(short_conv_kernel_size=1)),
            "linear_attn_config.short_conv_kernel_size",
        ),
        (kimi_linear(linear_attn_config=linear_config(head_dim=0)), "linear_attn_config.head_dim"),
    ],
)
def test_what_is_not_served_is_refused_by_name(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(raw)


def test_other_quantised_weights_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="hqq"):
        parse(kimi_linear(quantization_config={"quant_method": "hqq"}))


def test_ranks_that_do_not_share_out_heads_are_refused_by_name() -> None:
    entry = resolve_model(["KimiLinearForCausalLM"])
    entry.check_ranks(parse(kimi_linear()), 2, False)
    raw = kimi_linear(linear_attn_config=linear_config(num_heads=3))
    with pytest.raises(ConfigError, match="key heads of a recurrent layer 3"):
        entry.check_ranks(parse(raw), 2, False)


def release_config() -> Any:
    """The 48B's, of which absent fields are the defaults."""
    full = [4, 8, 12, 16, 20, 24, 27]
    return parse(
        {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": 163_840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "linear_attn_config": {
                "full_attn_layers": full,
                "kda_layers": [i for i in range(1, 28) if i not in full],
            },
        }
    )


def test_a_token_of_the_48b_takes_7_9_kib() -> None:
    config = release_config()
    specs = decoder_kv_cache_specs(config, 16, torch.bfloat16, torch.float32)
    states = specs.pop(STATES)
    assert isinstance(states, RecurrentStateSpec)
    assert states.shape.num_values == 20 * (32 * 128 * 128 + 3 * 32 * 128 * 3)
    assert len(specs) == 7
    assert sum(spec.page_size_bytes for spec in specs.values()) == 16 * 7 * 576 * 2
    assert {spec.page_layout().width for spec in specs.values()} == {576}
