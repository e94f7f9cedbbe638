"""Published architectures, as far as the KV cache depends on them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 129_280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_head_dim": 128,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 1_048_576,
    "num_nextn_predict_layers": 1,
}

_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 262_144,
}

_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
}

_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]

GEOMETRIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "v4-flash": {
            **_COMMON,
            "hidden_size": 4096,
            "num_hidden_layers": 43,
            "num_attention_heads": 64,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "compress_ratios": [0, 0] + [4, 128] * 20 + [4],
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
        },
        "v4-pro": {
            **_COMMON,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "o_groups": 16,
            "compress_ratios": [128, 128] + [4, 128] * 29 + [4],
            "n_routed_experts": 384,
            "moe_intermediate_size": 3072,
        },
        "gemma4-e4b": {
            **_GEMMA4,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "sliding_window": 512,
            "num_kv_shared_layers": 18,
            "hidden_size_per_layer_input": 256,
        },
        "gemma4-12b": {
            **_GEMMA4,
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
        "qwen3.5-4b": {
            **_QWEN3_5,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "linear_num_value_heads": 32,
        },
        "qwen3.5-27b": {
            **_QWEN3_5,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
        "qwen3.5-35b": {
            **_QWEN3_5,
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        "glm-5.3-flash": {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "text_config": {
                "model_type": "glm5_next_text",
                "vocab_size": 154_880,
                "hidden_size": 4096,
                "intermediate_size": 12_288,
                "num_hidden_layers": 45,
                "num_attention_heads": 64,
                "num_key_value_heads": 64,
                "index_kpool": 4,
                "num_nextn_predict_layers": 0,
            },
        },
        "kimi-linear": {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "vocab_size": 163_840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "model_max_length": 1_048_576,
            "linear_attn_config": {
                "full_attn_layers": _KIMI_FULL,
                "kda_layers": [i for i in range(1, 28) if i not in _KIMI_FULL],
                "head_dim": 128,
                "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
        },
    }
)
