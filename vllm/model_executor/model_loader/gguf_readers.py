"""What no field of the table says of an architecture's config: one function each. Torch-free."""

import struct
from itertools import pairwise
from typing import Any

from vllm.exceptions import CheckpointError, ConfigError
from vllm.model_executor.model_loader.gguf_keys import Keys

_DEFAULT_THETA = 10_000.0
_GEMMA3_LOCAL_THETA = 10_000.0
# Gemma 3's files name no pattern: every sixth layer is one of full attention.
_GEMMA3_PATTERN = 6
# Of these many layers is the one Gemma 3 that scales its scores otherwise (27B).
_GEMMA3_LAYERS_BY_HIDDEN = 62
# Of Gemma 2 likewise.
_GEMMA2_LAYERS_BY_HIDDEN = 46
_GEMMA4_THETA = 1_000_000.0
_ORIGINAL_LENGTH = "rope.scaling.original_context_length"
# What a magnitude of YaRN is 1 + this * the logarithm of its factor, times a share.
_LOG_MULTIPLIER, _YARN_STEP = "rope.scaling.yarn_log_multiplier", 0.1
_ROPE_FACTORS = "rope_freqs.weight"
_OLD_FACTOR = "rope.scale_linear"
# Factors that no release is known to have: of the magnitude, and of the share that is stretched.
_UNUSUAL = (
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
)
# Gemma 4's divisor of a pair that is not turned is 1e30, in fp32.
_NOT_TURNED = 0.99e30
_LOCAL, _FULL = "sliding_attention", "full_attention"


def read_equal_heads(keys: Keys) -> dict[str, Any]:
    """Return the heads and rotary base of a model whose layers are alike."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise keys.refuse(name, keys.integer(name), f"{head_dim}, the width of a head")
    return {
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": keys.number("rope.freq_base", _DEFAULT_THETA),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }


def read_scaling(keys: Keys) -> dict[str, Any]:
    """Return rope_scaling, if there is any."""
    factors = keys.file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        return {"rope_scaling": {"rope_type": "divided", "divisors": _read_floats(factors)}}
    by_length = [keys.file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")]
    if None not in by_length:
        return {"rope_scaling": _read_lengths(keys, *by_length)}
    # Old files have one number instead.
    is_old = keys.has(_OLD_FACTOR) and not keys.has("rope.scaling.type")
    kind = keys.text("rope.scaling.type", "linear" if is_old else "none")
    if kind == "none":
        return {}
    factor = keys.number(_OLD_FACTOR if is_old else "rope.scaling.factor", 1.0)
    for name in _UNUSUAL:
        keys.require(name, 1.0, 1.0)
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        return {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
                "original_max_position_embeddings": keys.integer(
                    _ORIGINAL_LENGTH, keys.integer("context_length")
                ),
            }
        }
    raise keys.refuse("rope.scaling.type", kind, "none, linear, yarn")


def _read_lengths(keys: Keys, long: Any, short: Any) -> dict[str, Any]:
    """Returns divisors of contexts past the length that was trained first, and of others."""
    scaling = {
        "rope_type": "longrope",
        "long_factor": _read_floats(long),
        "short_factor": _read_floats(short),
        "original_max_position_embeddings": keys.integer(_ORIGINAL_LENGTH),
    }
    if keys.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return scaling


def _read_floats(tensor: Any) -> list[float]:
    if tensor.type.name != "F32":
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} is of type {tensor.type.name}, must be F32."
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.offset)
        raw = opened.read(tensor.num_bytes)
    values = list(struct.unpack(f"<{len(raw) // 4}f", raw))
    if not all(0 < value < float("inf") for value in values):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} holds a value that is not > 0.")
    return values


def read_llama(keys: Keys) -> dict[str, Any]:
    """Return what Llama's files say besides the table."""
    if keys.has("expert_count") and keys.file.keys.get("llama.expert_count"):
        raise keys.refuse("expert_count", keys.integer("expert_count"), "none, as in Llama")
    if "blk.0.attn_q.bias" in keys.file.tensors:
        raise ConfigError(f"{keys.file.path}: tensor blk.0.attn_q.bias, which Llama has not")
    return {**read_equal_heads(keys), **read_scaling(keys)}


def read_plain(keys: Keys) -> dict[str, Any]:
    """Return the heads and the rotary setting of a model whose layers are alike."""
    return {**read_equal_heads(keys), **read_scaling(keys)}


def read_gemma3(keys: Keys) -> dict[str, Any]:
    """Return what Gemma 3's files say besides the table."""
    layers, hidden = keys.integer("block_count"), keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    scalar = keys.integer("attention.key_length", hidden // heads)
    if layers == _GEMMA3_LAYERS_BY_HIDDEN:
        scalar = hidden // heads
    return {
        **read_equal_heads(keys),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN),
        "query_pre_attn_scalar": scalar,
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        **read_scaling(keys),
    }


def read_gemma4(keys: Keys) -> dict[str, Any]:
    """Return what Gemma 4's files say besides the table."""
    layers = keys.integer("block_count")
    first_sharing = layers - keys.count("attention.shared_kv_layers")
    full_dim = keys.integer("attention.key_length")
    local_dim = keys.integer("attention.key_length_swa", full_dim)
    for name, dim in (
        ("attention.value_length", full_dim),
        ("attention.value_length_swa", local_dim),
    ):
        if keys.integer(name, dim) != dim:
            raise keys.refuse(name, keys.integer(name), f"{dim}, the width of its keys")
    is_local = keys.booleans("attention.sliding_window_pattern", layers)
    kv_heads = keys.integers("attention.head_count_kv", layers)
    config = {
        "layer_types": [_LOCAL if local else _FULL for local in is_local],
        "head_dim": local_dim,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(index): {"head_dim": local_dim if local else full_dim, "num_key_value_heads": heads}
            for index, (local, heads) in enumerate(zip(is_local, kv_heads, strict=True))
        },
        # One product makes both: the file has no matrix of values.
        "attention_k_eq_v": any(
            not local and f"blk.{index}.attn_v.weight" not in keys.file.tensors
            for index, local in enumerate(is_local[: max(first_sharing, 0)])
        ),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "num_kv_shared_layers": layers - first_sharing,
        "rope_parameters": _read_gemma4_ropes(keys),
        **_read_gemma4_widths(keys, first_sharing),
        **_read_layer_inputs(keys),
        # No key says so: pictures are causal in the models that have inputs of layers.
        "use_bidirectional_attention": None
        if keys.count("embedding_length_per_layer_input")
        else "vision",
    }
    if keys.count("expert_count"):
        config["enable_moe_block"] = True
        config["num_experts"] = keys.integer("expert_count")
        config["top_k_experts"] = keys.integer("expert_used_count")
        config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    return config


def _read_gemma4_ropes(keys: Keys) -> dict[str, Any]:
    full: dict[str, Any] = {
        "rope_type": "proportional",
        "rope_theta": keys.number("rope.freq_base", _GEMMA4_THETA),
    }
    if (divisors := keys.file.tensors.get(_ROPE_FACTORS)) is not None:
        values = _read_floats(divisors)
        turned = sum(value == 1.0 for value in values)
        if values[:turned] != [1.0] * turned or any(
            value < _NOT_TURNED for value in values[turned:]
        ):
            raise CheckpointError(
                f"{divisors.file}: tensor {divisors.name} holds other values than 1 for the pairs "
                "that are turned and 1e30 for those behind them."
            )
        # Half a pair more: a share that is rounded down gives the same number again.
        full["partial_rotary_factor"] = min(1.0, (turned + 0.5) / len(values))
    theta = keys.number("rope.freq_base_swa", _DEFAULT_THETA)
    return {_FULL: full, _LOCAL: {"rope_type": "default", "rope_theta": theta}}


def _read_gemma4_widths(keys: Keys, first_sharing: int) -> dict[str, Any]:
    """Returns the width of MLPs: of layers that share keys and values it may be twice as much."""
    widths = keys.integers("feed_forward_length", keys.integer("block_count"))
    narrow, is_wide = widths[0], widths[-1] != widths[0]
    if any(
        width != (2 * narrow if is_wide and index >= first_sharing else narrow)
        for index, width in enumerate(widths)
    ):
        allowed = "one width, and twice as much in the layers that share keys and values"
        raise keys.refuse("feed_forward_length", widths, allowed)
    return {"intermediate_size": narrow, "use_double_wide_mlp": is_wide}


def _read_layer_inputs(keys: Keys) -> dict[str, Any]:
    width = keys.count("embedding_length_per_layer_input")
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    if (table is not None) != bool(width):
        allowed = "a number above 0 if and only if there is a tensor per_layer_token_embd.weight"
        raise keys.refuse("embedding_length_per_layer_input", width, allowed)
    rows = {"vocab_size_per_layer_input": table.shape[0]} if table is not None else {}
    return {"hidden_size_per_layer_input": width, **rows}


def read_qwen35(keys: Keys) -> dict[str, Any]:
    """Return what files of Qwen 3.5 and Qwen3-Next say besides the table."""
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        value = keys.integer("attention.value_length")
        raise keys.refuse("attention.value_length", value, f"{head_dim}, the width of a key")
    turned = keys.integer("rope.dimension_count", head_dim // 4)
    value_heads, values = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if values % value_heads:
        raise keys.refuse(
            "ssm.inner_size", values, f"a multiple of ssm.time_step_rank, {value_heads}"
        )
    return {
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base", _DEFAULT_THETA),
            "partial_rotary_factor": turned / head_dim,
            **_read_sections(keys),
        },
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": values // value_heads,
        **_read_recurrent_layers(keys),
    }


def _read_sections(keys: Keys) -> dict[str, Any]:
    """Returns how many pairs a token's number, its row and its column turn; a fourth is 0."""
    name = "rope.dimension_sections"
    return {"mrope_section": keys.counts(name, 3)} if keys.has(name) else {}


def _read_recurrent_layers(keys: Keys) -> dict[str, Any]:
    """Returns which layers are recurrent: all but every so many, or those that a list names."""
    if not keys.has("attention.recurrent_layers"):
        return {"full_attention_interval": keys.integer("full_attention_interval", 4)}
    kinds = {True: "linear_attention", False: _FULL}
    listed = _read_layer_flags(keys, "attention.recurrent_layers")
    return {"layer_types": [kinds[is_recurrent] for is_recurrent in listed]}


def _read_layer_flags(keys: Keys, name: str) -> list[bool]:
    """Returns what a list says of each layer, blocks that draft left out."""
    return keys.booleans(name, _count_layers(keys), keys.count("nextn_predict_layers"))


def _count_layers(keys: Keys) -> int:
    """Returns how many there are, blocks that draft left out."""
    return keys.integer("block_count") - keys.count("nextn_predict_layers")


def read_gpt_oss(keys: Keys) -> dict[str, Any]:
    """Return what gpt-oss's files say besides the table."""
    scaling = read_scaling(keys)
    if scaling:
        # The family's ramp is not rounded, which no key says.
        scaling["rope_scaling"]["truncate"] = False
    else:
        scaling = {"rope_scaling": {"rope_type": "default"}}
    return {
        **read_equal_heads(keys),
        **scaling,
    }


def read_qwen35_experts(keys: Keys) -> dict[str, Any]:
    """Return the same of those with experts: the shared one is as wide as a routed one."""
    inner = keys.integer("expert_feed_forward_length")
    shared = keys.integer("expert_shared_feed_forward_length", inner)
    return {**read_qwen35(keys), "shared_expert_intermediate_size": shared}


def read_experts_of_any_width(keys: Keys) -> dict[str, Any]:
    """Return what files of experts alone say, in which the width of dense layers is nobody's."""
    inner = keys.integer("expert_feed_forward_length")
    return {
        **read_plain(keys),
        "intermediate_size": keys.integer("feed_forward_length", inner),
    }


# How a router makes scores of logits, by the number of ``expert_gating_func``.
_SQRT_SOFTPLUS = 4
# What the layers of DeepSeek-V4 may compress by.
_V4_RATIOS = (0, 4, 128)


def read_deepseek4(keys: Keys) -> dict[str, Any]:
    """Return what DeepSeek-V4's files say besides the table."""
    head_dim = keys.integer("attention.key_length")
    keys.require("attention.head_count_kv", 1, 1)
    keys.require("attention.value_length", head_dim, head_dim)
    keys.require("expert_gating_func", None, _SQRT_SOFTPLUS)
    count = _count_layers(keys)
    ratios = keys.counts("attention.compress_ratios", count)
    if not set(ratios) <= set(_V4_RATIOS):
        allowed = f"{', '.join(map(str, _V4_RATIOS))} for each layer"
        raise keys.refuse("attention.compress_ratios", ratios, allowed)
    return {
        "compress_ratios": ratios,
        "swiglu_limit": _read_v4_limit(keys, count),
        **_read_v4_scaling(keys),
    }


def _read_v4_limit(keys: Keys, num_layers: int) -> float:
    """Returns what all experts are clamped at: files give it by layer, and the shared one's too."""
    limits = {
        limit
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
        if keys.has(name)
        for limit in keys.numbers(name, num_layers)
    }
    if len(limits) > 1:
        allowed = "one number for all layers and experts"
        raise keys.refuse("swiglu_clamp_exp", sorted(limits), allowed)
    return limits.pop() if limits else keys.number("swiglu_clamp_exp")


def _read_v4_scaling(keys: Keys) -> dict[str, Any]:
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind != "yarn":
        raise keys.refuse("rope.scaling.type", kind, "none, yarn")
    return {
        "rope_scaling": {
            "type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            "original_max_position_embeddings": keys.integer(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    }


def read_gemma2(keys: Keys) -> dict[str, Any]:
    """Return what Gemma 2's files say besides the table."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    by_hidden = keys.integer("block_count") == _GEMMA2_LAYERS_BY_HIDDEN
    scalar = hidden // heads if by_hidden else keys.integer("attention.key_length", hidden // heads)
    return {**read_plain(keys), "query_pre_attn_scalar": scalar}


def read_qwen2_moe(keys: Keys) -> dict[str, Any]:
    """Return what files of Qwen 2's experts say besides the table."""
    inner = keys.integer("expert_feed_forward_length")
    shared = keys.integer("expert_shared_feed_forward_length", inner)
    return {**read_experts_of_any_width(keys), "shared_expert_intermediate_size": shared}


def read_mistral3(keys: Keys) -> dict[str, Any]:
    """Return what files of Mistral Small, Ministral 3 and Devstral say besides the table."""
    if keys.count("expert_count"):
        allowed = "none: mixtures of experts of this architecture are not served"
        raise keys.refuse("expert_count", keys.integer("expert_count"), allowed)
    config = {**read_equal_heads(keys), **read_scaling(keys)}
    scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn" and keys.has(_LOG_MULTIPLIER):
        scaling |= {"mscale": 1.0, "mscale_all_dim": keys.number(_LOG_MULTIPLIER)}
    if keys.has("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
        scaling["original_max_position_embeddings"] = keys.integer(_ORIGINAL_LENGTH)
    return config


# How a router makes scores of logits, by the number of ``expert_gating_func``.
_SOFTMAX, _SIGMOID = 1, 2
# Of these many layers and tokens is the one model without the key that has sigmoids.
_GLM_FLASH_LAYERS, _GLM_FLASH_VOCABULARY = (47, 48), 154_880


def read_deepseek2(keys: Keys) -> dict[str, Any]:
    """Return what files of DeepSeek V2 and V3, Kimi K2 and GLM 4.7 Flash say besides the table."""
    config = _read_latent_heads(keys)
    if _find_gating(keys) == _SIGMOID:
        return config
    groups = keys.count("expert_group_count")
    return {
        **config,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def read_deepseek32(keys: Keys) -> dict[str, Any]:
    """Return what files of DeepSeek V3.2 say besides the table."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    return _read_latent_heads(keys)


def read_glm_dsa(keys: Keys) -> dict[str, Any]:
    """Return what files of GLM 5 say besides the table."""
    return {**read_deepseek32(keys), "indexer_types": _read_indexer_types(keys)}


def _read_indexer_types(keys: Keys) -> list[str]:
    """Returns which layers have an indexer: as a list says, else all."""
    listed = "attention.indexer.types"
    if not keys.has(listed):
        return ["full"] * _count_layers(keys)
    return ["full" if has else "shared" for has in _read_layer_flags(keys, listed)]


def _read_latent_heads(keys: Keys) -> dict[str, Any]:
    """Returns the widths of latent attention with positions, and how these are stretched."""
    turned = keys.integer("rope.dimension_count")
    # Old files give the widths of heads where newer ones give those of cached rows.
    is_old = not keys.has("attention.key_length_mla")
    key_dim = keys.integer("attention.key_length" if is_old else "attention.key_length_mla")
    value_name = "attention.value_length" if is_old else "attention.value_length_mla"
    if key_dim <= turned:
        raise keys.refuse(
            "attention.key_length", key_dim, f"more than the {turned} that are turned"
        )
    config: dict[str, Any] = {
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key_dim - turned,
        "v_head_dim": keys.integer(value_name),
        **read_scaling(keys),
    }
    if "rope_scaling" in config and keys.has(_LOG_MULTIPLIER):
        share = round(keys.number(_LOG_MULTIPLIER) / _YARN_STEP, 6)
        config["rope_scaling"] |= {"mscale": share, "mscale_all_dim": share}
    return config


def _find_gating(keys: Keys) -> int:
    tokens = keys.file.keys.get("tokenizer.ggml.tokens")
    is_flash = keys.integer("block_count") in _GLM_FLASH_LAYERS and (
        isinstance(tokens, list) and len(tokens) == _GLM_FLASH_VOCABULARY
    )
    default = _SIGMOID if is_flash else _SOFTMAX
    keys.require("expert_gating_func", default, _SOFTMAX, _SIGMOID)
    return keys.integer("expert_gating_func", default)


def read_glm4_moe(keys: Keys) -> dict[str, Any]:
    """Return what files of GLM 4.5 to 4.7 say besides the table."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    return {
        **_read_partly_turned(keys),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
    }


def read_minimax_m2(keys: Keys) -> dict[str, Any]:
    """Return what MiniMax M2's files say besides the table."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    return _read_partly_turned(keys)


def _read_partly_turned(keys: Keys) -> dict[str, Any]:
    """Returns the heads of which the first values are turned."""
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        value = keys.integer("attention.value_length")
        raise keys.refuse("attention.value_length", value, f"{head_dim}, the width of a key")
    turned = keys.integer("rope.dimension_count", head_dim)
    scaling = read_scaling(keys).get("rope_scaling", {"rope_type": "default"})
    return {
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "rope_parameters": {
            **scaling,
            "rope_theta": keys.number("rope.freq_base", _DEFAULT_THETA),
            "partial_rotary_factor": turned / head_dim,
        },
    }


def find_gate_rows(keys: Keys, num_rows: int) -> list[list[int]]:
    """Return which rows of both gates' matrix are each one's: they lie together by key head.

    Raises:
        ConfigError: So many rows have no such gates.
    """
    groups = keys.integer("ssm.group_count")
    if num_rows % (2 * groups):
        raise keys.refuse(
            "ssm.group_count", groups, f"half a divisor of the {num_rows} rows of ssm_ba"
        )
    own = num_rows // groups // 2
    return [
        [first + row for first in range(gate * own, num_rows, 2 * own) for row in range(own)]
        for gate in range(2)
    ]


def read_kimi_linear(keys: Keys) -> dict[str, Any]:
    """Return what Kimi Linear's files say besides the table."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    heads, rank = keys.integer("attention.head_count"), keys.integer("attention.kv_lora_rank")
    count = keys.integer("block_count")
    is_full = [bool(heads) for heads in keys.counts("attention.head_count_kv", count)]
    shared = keys.integer("attention.key_length") - rank
    key_dim = keys.integer("attention.key_length_mla") - shared
    if shared < 1 or key_dim < 1:
        allowed = f"more than attention.kv_lora_rank, {rank}, by less than attention.key_length_mla"
        raise keys.refuse("attention.key_length", shared + rank, allowed)
    return {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": key_dim,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, own in enumerate(is_full) if own],
            "kda_layers": [i + 1 for i, own in enumerate(is_full) if not own],
            "head_dim": keys.integer("kda.head_dim"),
            "num_heads": heads,
            "short_conv_kernel_size": keys.integer("ssm.conv_kernel"),
        },
    }


def read_glm5_next(keys: Keys) -> dict[str, Any]:
    """Return what files of GLM 5.3 Flash say besides the table."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    keys.require("attention.indexer.kpool_select_tail", True, True)
    count = _count_layers(keys)
    heads = keys.integer("attention.head_count")
    is_full = [bool(own) for own in keys.counts("attention.head_count_kv", count)]
    # Signs differ among the writers: it is how far below zero a logarithm may be.
    bound = keys.file.keys.get("glm5-next.kda.gate_lower_bound", -5.0)
    if type(bound) is not float or not bound:
        raise keys.refuse("kda.gate_lower_bound", bound, "a number below zero")
    return {
        "num_key_value_heads": heads,
        "layer_types": ["indexed_attention" if own else "linear_attention" for own in is_full],
        "linear_num_heads": heads,
        "linear_lower_bound": -abs(float(f"{bound:.7g}")),
        "swiglu_limit": _read_v4_limit(keys, count),
    }


def read_lfm2(keys: Keys) -> dict[str, Any]:
    """Return what LFM2's files say besides the table: layers without key heads are convolutions."""
    count = keys.integer("block_count")
    key_heads = keys.counts("attention.head_count_kv", count)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    numbers = set(key_heads) - {0}
    if len(numbers) != 1:
        allowed = "0 for convolutions, and one number for all layers of attention"
        raise keys.refuse("attention.head_count_kv", key_heads, allowed)
    return {
        "num_key_value_heads": numbers.pop(),
        "head_dim": keys.integer("attention.key_length", hidden // heads),
        "layer_types": [_FULL if own else "conv" for own in key_heads],
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        **read_scaling(keys),
    }


def read_lfm2_moe(keys: Keys) -> dict[str, Any]:
    """Return the same of those with experts."""
    keys.require("expert_gating_func", _SIGMOID, _SIGMOID)
    return read_lfm2(keys)


def read_phi3(keys: Keys) -> dict[str, Any]:
    """Return what files of Phi 3 and 4 say besides the table."""
    config = _read_partly_turned(keys)
    return {**config, "sliding_window": keys.count("attention.sliding_window") or None}


def find_head_rows(keys: Keys, num_rows: int) -> list[list[int]]:
    """Return which rows of a fused matrix are queries', keys' and values'.

    Raises:
        ConfigError: It has other rows than the keys say.
    """
    heads = keys.integer("attention.head_count")
    key_heads = keys.integer("attention.head_count_kv", heads)
    dim = keys.integer("attention.key_length", keys.integer("embedding_length") // heads)
    bounds = [0, heads * dim, (heads + key_heads) * dim, (heads + 2 * key_heads) * dim]
    if num_rows != bounds[-1]:
        raise keys.refuse("attention.head_count", heads, f"heads of {num_rows} rows of attn_qkv")
    return [list(range(*both)) for both in pairwise(bounds)]


def find_half_rows(keys: Keys, num_rows: int) -> list[list[int]]:
    """Return which rows of a fused matrix are the gate's and which the other's.

    Raises:
        ConfigError: It has other rows than the keys say.
    """
    width = keys.integer("feed_forward_length")
    if num_rows != 2 * width:
        raise keys.refuse("feed_forward_length", width, f"half of the {num_rows} rows of ffn_up")
    return [list(range(width)), list(range(width, num_rows))]
