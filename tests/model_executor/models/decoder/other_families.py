"""Tiny configs of families beside those of ``reference``, each with what its GGUF file says."""

from typing import Any

from tests.model_executor.models.decoder.reference import (
    _BASE,
    deepseek_v32,
    glm5_next,
    glm_moe_dsa,
    kimi_linear,
)

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_SCORED = {
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def _make(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    raw = {**_BASE, "architectures": [architecture], "model_type": model_type, **own}
    return raw


def _latent(architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    raw = _make(architecture, model_type, **{**_SCORED, **_LATENT, **own})
    del raw["head_dim"]
    return raw


def _phi3(**own: Any) -> dict[str, Any]:
    raw = _make(
        "Phi3ForCausalLM",
        "phi3",
        tie_word_embeddings=False,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **own},
    )
    del raw["head_dim"]
    return {**raw, "hidden_size": 64}


def _lfm2(architecture: str, model_type: str, kinds: str, **own: Any) -> dict[str, Any]:
    """Returns a config whose layers are convolutions (c) and attention (a)."""
    raw = _make(
        architecture,
        model_type,
        hidden_size=64,
        num_hidden_layers=len(kinds),
        layer_types=["conv" if kind == "c" else "full_attention" for kind in kinds],
        norm_eps=1e-5,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=False,
        rope_theta=1e6,
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **own},
    )
    del raw["head_dim"], raw["rms_norm_eps"]
    return raw


OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": _lfm2("Lfm2ForCausalLM", "lfm2", "cacac"),
    "lfm2moe": _lfm2(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        "ccaca",
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
    ),
    "qwen2moe": _make(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        rope_theta=1e6,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        head_dim=12,
        tie_word_embeddings=False,
    ),
    "gemma2": _make(
        "Gemma2ForCausalLM",
        "gemma2",
        sliding_window=16,
        query_pre_attn_scalar=16,
        num_hidden_layers=4,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        rope_theta=10000.0,
    ),
    "mistral3": _make(
        "Ministral3ForCausalLM",
        "ministral3",
        rope_parameters={
            **_YARN,
            "rope_theta": 10000.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
        tie_word_embeddings=False,
    ),
    "glm4moe": _make(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
        **_SCORED,
    ),
    "minimax-m2": _make(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        rotary_dim=8,
        rope_theta=1e4,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi3": _phi3(
        original_max_position_embeddings=32,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "long_factor": [1.0 + 0.25 * i for i in range(6)],
            "short_factor": [1.0] * 6,
        },
    ),
    "phi3-window": _phi3(rope_theta=1e4, sliding_window=20),
    "qwen3next": _make(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        mtp_num_hidden_layers=0,
        rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
    "deepseek2": _latent(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        n_group=4,
        topk_group=2,
        rope_theta=1e4,
        num_nextn_predict_layers=0,
    ),
    "deepseek2-yarn": _latent(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        n_group=1,
        topk_group=1,
        rope_parameters={**_YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
        num_nextn_predict_layers=0,
    ),
    "deepseek32": deepseek_v32(num_nextn_predict_layers=0),
    "glm-dsa": glm_moe_dsa(num_nextn_predict_layers=0),
    "deepseek2-softmax": _latent(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        norm_topk_prob=False,
        topk_method="group_limited_greedy",
        q_lora_rank=None,
        n_group=4,
        topk_group=2,
        rope_theta=1e4,
    ),
}
"""By the architecture of its GGUF files, and what is different about it."""

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "kimi-linear": kimi_linear(),
    "glm5-next": glm5_next(),
}
"""Those whose logits have tests of their own, likewise."""
