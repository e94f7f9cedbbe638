"""A GGUF file's keys as the config.json that its model would have. Torch-free."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm.exceptions import CheckpointError, ConfigError, UnsupportedModelError
from vllm.utils.gguf_file import GgufFile, read_gguf

_DEFAULT_THETA = 10_000.0
_GEMMA3_LOCAL_THETA = 10_000.0
# Gemma 3's files name no pattern: every sixth layer is one of full attention.
_GEMMA3_PATTERN = 6
# Of these many layers is the one Gemma 3 that scales its scores otherwise (27B).
_GEMMA3_LAYERS_BY_HIDDEN = 62
_GEMMA4_THETA = 1_000_000.0
_ROPE_FACTORS = "rope_freqs.weight"
# Gemma 4's divisor of a pair that is not turned is 1e30, in fp32.
_NOT_TURNED = 0.99e30
_LOCAL, _FULL = "sliding_attention", "full_attention"


def read_gguf_config(path: str | Path) -> dict[str, Any]:
    """Return what a file's config.json would say.

    Raises:
        CheckpointError: The file is broken.
        UnsupportedModelError: Its architecture is not served.
        ConfigError: A key is missing or of the wrong type.
    """
    file = read_gguf(path)
    architecture = str(file.keys.get("general.architecture"))
    if architecture not in _READERS:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {architecture!r}, which is not served from "
            f"GGUF: served are {', '.join(_READERS)}."
        )
    keys = _Keys(file, architecture)
    return {**_read_common(keys), **_READERS[architecture](keys)}


def count_layers(file: GgufFile) -> int:
    """Return how many of a file's blocks are layers: those behind them draft tokens.

    Raises:
        ConfigError: As ``read_gguf_config``.
    """
    keys = _Keys(file, str(file.keys.get("general.architecture")))
    blocks, drafting = keys.integer("block_count"), keys.count("nextn_predict_layers")
    if drafting >= blocks:
        raise keys.refuse("nextn_predict_layers", drafting, f"less than block_count, {blocks}")
    return blocks - drafting


class _Keys:
    """Typed reading of one architecture's keys."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self._prefix = file, architecture

    def has(self, name: str) -> bool:
        return f"{self._prefix}.{name}" in self.file.keys

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < 1:
            raise self.refuse(name, value, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refuse(name, value, "a positive number")
        # As its shortest spelling in fp32: 1e-6, not 9.999999974752427e-07.
        return float(f"{value:.7g}")

    def integers(self, name: str, count: int, default: int | None = None) -> list[int]:
        """Return one number for each layer; a file may give one for all."""
        value = self._get(name, default)
        if not isinstance(value, list):
            return [self.integer(name, default)] * count
        if len(value) != count or not all(type(item) is int and item >= 1 for item in value):
            raise self.refuse(name, value, f"{count} integers of at least 1, one a layer")
        return value

    def booleans(self, name: str, count: int) -> list[bool]:
        """Return one for each layer."""
        value = self._get(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(item) is bool for item in value)
        ):
            raise self.refuse(name, value, f"{count} booleans, one a layer")
        return value

    def count(self, name: str) -> int:
        """Return a number that may be 0, as it is where the key is missing."""
        value = self._get(name, 0)
        if type(value) is not int or value < 0:
            raise self.refuse(name, value, "an integer of at least 0")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, value, "text")
        return value

    def refuse(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(
            f"{self.file.path}: key {self._prefix}.{name} is {value!r}; allowed: {allowed}"
        )

    def _get(self, name: str, default: Any) -> Any:
        value = self.file.keys.get(f"{self._prefix}.{name}", default)
        if value is None:
            raise ConfigError(
                f"{self.file.path} lacks the key {self._prefix}.{name}, which has no default"
            )
        return value


def _read_common(keys: _Keys) -> dict[str, Any]:
    tokens = keys.file.keys.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else keys.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": count_layers(keys.file),
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "torch_dtype": "bfloat16",
        **_read_end_tokens(keys.file.keys),
    }


def _read_equal_heads(keys: _Keys) -> dict[str, Any]:
    """Returns the heads and rotary base of a model whose layers are alike."""
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


def _read_end_tokens(keys: Mapping[str, Any]) -> dict[str, Any]:
    names = ("eos", "eot", "eom")
    found = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(token_id for token_id in found if type(token_id) is int))
    tokens: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    if type(bos := keys.get("tokenizer.ggml.bos_token_id")) is int:
        tokens["bos_token_id"] = bos
    return tokens


def _read_scaling(keys: _Keys) -> dict[str, Any]:
    """Returns rope_scaling, if there is any."""
    factors = keys.file.tensors.get(_ROPE_FACTORS)
    if factors is not None:
        return {"rope_scaling": {"rope_type": "divided", "divisors": _read_floats(factors)}}
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return {}
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0}
        length = keys.integer("rope.scaling.original_context_length")
        return {"rope_scaling": {**scaling, "original_max_position_embeddings": length}}
    raise keys.refuse("rope.scaling.type", kind, "none, linear, yarn")


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


def _read_llama(keys: _Keys) -> dict[str, Any]:
    if keys.has("expert_count") and keys.file.keys.get("llama.expert_count"):
        raise keys.refuse("expert_count", keys.integer("expert_count"), "none, as in Llama")
    if "blk.0.attn_q.bias" in keys.file.tensors:
        raise ConfigError(f"{keys.file.path}: tensor blk.0.attn_q.bias, which Llama has not")
    return {
        **_read_equal_heads(keys),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": keys.integer("feed_forward_length"),
        **_read_scaling(keys),
    }


def _read_qwen2(keys: _Keys) -> dict[str, Any]:
    return {**_read_qwen3(keys), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def _read_qwen3(keys: _Keys) -> dict[str, Any]:
    return {
        **_read_equal_heads(keys),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": keys.integer("feed_forward_length"),
        **_read_scaling(keys),
    }


def _read_qwen3_moe(keys: _Keys) -> dict[str, Any]:
    inner = keys.integer("expert_feed_forward_length")
    return {
        **_read_equal_heads(keys),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": keys.integer("feed_forward_length", inner),
        "moe_intermediate_size": inner,
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        # No key says so: every release does.
        "norm_topk_prob": True,
        **_read_scaling(keys),
    }


def _read_gemma3(keys: _Keys) -> dict[str, Any]:
    layers, hidden = keys.integer("block_count"), keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    scalar = keys.integer("attention.key_length", hidden // heads)
    if layers == _GEMMA3_LAYERS_BY_HIDDEN:
        scalar = hidden // heads
    return {
        **_read_equal_heads(keys),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": keys.integer("feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN),
        "query_pre_attn_scalar": scalar,
        "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
        # Files store norms with one added, as they are multiplied by.
        "norm_weights_are_factors": True,
        **(
            {"final_logit_softcapping": keys.number("final_logit_softcapping")}
            if keys.has("final_logit_softcapping")
            else {}
        ),
        **_read_scaling(keys),
    }


def _read_gemma4(keys: _Keys) -> dict[str, Any]:
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
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
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
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": layers - first_sharing,
        "rope_parameters": _read_gemma4_ropes(keys),
        **_read_gemma4_widths(keys, first_sharing),
        **_read_layer_inputs(keys),
    }
    if keys.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    if keys.count("expert_count"):
        config["enable_moe_block"] = True
        config["num_experts"] = keys.integer("expert_count")
        config["top_k_experts"] = keys.integer("expert_used_count")
        config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    return config


def _read_gemma4_ropes(keys: _Keys) -> dict[str, Any]:
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


def _read_gemma4_widths(keys: _Keys, first_sharing: int) -> dict[str, Any]:
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


def _read_layer_inputs(keys: _Keys) -> dict[str, Any]:
    width = keys.count("embedding_length_per_layer_input")
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    if (table is not None) != bool(width):
        allowed = "a number above 0 if and only if there is a tensor per_layer_token_embd.weight"
        raise keys.refuse("embedding_length_per_layer_input", width, allowed)
    rows = {"vocab_size_per_layer_input": table.shape[0]} if table is not None else {}
    return {"hidden_size_per_layer_input": width, **rows}


def _read_qwen35(keys: _Keys) -> dict[str, Any]:
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
    config = {
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base", _DEFAULT_THETA),
            "partial_rotary_factor": turned / head_dim,
        },
        "full_attention_interval": keys.integer("full_attention_interval", 4),
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": values // value_heads,
        # Files store norms with one added, as they are multiplied by.
        "norm_weights_are_factors": True,
    }
    if not keys.has("expert_count"):
        return {
            **config,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "intermediate_size": keys.integer("feed_forward_length"),
        }
    inner = keys.integer("expert_feed_forward_length")
    return {
        **config,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length", inner),
    }


def _read_gpt_oss(keys: _Keys) -> dict[str, Any]:
    scaling = _read_scaling(keys)
    if scaling:
        # The family's ramp is not rounded, which no key says.
        scaling["rope_scaling"]["truncate"] = False
    else:
        scaling = {"rope_scaling": {"rope_type": "default"}}
    return {
        **_read_equal_heads(keys),
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "sliding_window": keys.integer("attention.sliding_window"),
        **scaling,
    }


_READERS: Mapping[str, Callable[[_Keys], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _read_llama,
        "qwen2": _read_qwen2,
        "qwen3": _read_qwen3,
        "qwen3moe": _read_qwen3_moe,
        "gemma3": _read_gemma3,
        "gemma4": _read_gemma4,
        "gpt-oss": _read_gpt_oss,
        "qwen35": _read_qwen35,
        "qwen35moe": _read_qwen35,
    }
)
