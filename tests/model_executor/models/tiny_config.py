"""A DeepSeek-V4 small enough for tests, without what builds one."""

from typing import Any


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Returns the published spelling of a tiny config with every layer type."""
    base: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 96,
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4, 0],
        "index_n_heads": 12,
        "index_head_dim": 16,
        "index_topk": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_hash_layers": 1,
        "hc_mult": 4,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
    }
    return {**base, **overrides}
