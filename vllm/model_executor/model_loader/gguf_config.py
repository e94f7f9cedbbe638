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
_ROPE_FACTORS = "rope_freqs.weight"


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
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(name, head_dim) != head_dim:
            raise keys.refuse(name, keys.integer(name), f"{head_dim}, the width of a head")
    tokens = keys.file.keys.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else keys.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", _DEFAULT_THETA),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "torch_dtype": "bfloat16",
        **_read_end_tokens(keys.file.keys),
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
        return {"rope_scaling": {"rope_type": "divided", "divisors": _read_floats(keys, factors)}}
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


def _read_floats(keys: _Keys, tensor: Any) -> list[float]:
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
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": keys.integer("feed_forward_length"),
        **_read_scaling(keys),
    }


def _read_qwen3(keys: _Keys) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": keys.integer("feed_forward_length"),
        **_read_scaling(keys),
    }


def _read_qwen3_moe(keys: _Keys) -> dict[str, Any]:
    inner = keys.integer("expert_feed_forward_length")
    return {
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


def _read_gpt_oss(keys: _Keys) -> dict[str, Any]:
    scaling = _read_scaling(keys)
    if scaling:
        # The family's ramp is not rounded, which no key says.
        scaling["rope_scaling"]["truncate"] = False
    else:
        scaling = {"rope_scaling": {"rope_type": "default"}}
    return {
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
        "qwen3": _read_qwen3,
        "qwen3moe": _read_qwen3_moe,
        "gemma3": _read_gemma3,
        "gpt-oss": _read_gpt_oss,
    }
)
