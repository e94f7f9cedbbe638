"""What serving a model takes, held against what is free, before the minutes that weights take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.mem_constants import format_size

logger = init_logger(__name__)

_FP32_BYTES = 4
# Residual streams, their normed copy, a sublayer's output and the expanded result.
_NUM_STREAM_COPIES = 4
# Queries, their normed copy, and what the heads attended.
_NUM_HEAD_COPIES = 3
# The table's rows and the embedding's projection, of all layers.
_NUM_LAYER_INPUT_COPIES = 2
# Rows sorted by expert, and what the experts made of them.
_NUM_EXPERT_ROW_COPIES = 2
# Logits, their log probabilities, and a sorted copy.
_NUM_LOGIT_COPIES = 3
# A quantised matrix is decoded in tiles of at most so many values.
_MAX_TILE_VALUES = 1 << 26


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that serving needs at the least.

    Attributes:
        weights: Of the model's parameters, as they will be kept.
        kv_cache: Of the pool that the user asked for, else of one that holds a single request of
            the longest length.
        activations: Of the largest step; an estimate.
        asks_for_pool: Whether the user asked for a pool.
    """

    weights: int
    kv_cache: int
    activations: int
    asks_for_pool: bool = False

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.kv_cache + self.activations


def check_memory(config: VllmConfig, needs: MemoryNeeds, free_bytes: int) -> None:
    """Log what is needed, and refuse what does not fit.

    Raises:
        ConfigError: More is needed than is free; the message names both, and each part.
    """
    whose = "the KV cache that was asked for"
    if not needs.asks_for_pool:
        whose = f"a KV cache of one request of {config.model_config.max_model_len} tokens"
    parts = (
        f"weights {format_size(needs.weights)}, {whose} {format_size(needs.kv_cache)}, activations "
        f"about {format_size(needs.activations)} (a step of {_num_step_tokens(config)} tokens)"
    )
    if needs.total > free_bytes:
        raise ConfigError(
            f"{config.model_config.model} needs {format_size(needs.total)} "
            f"({needs.total:,} bytes), but {format_size(free_bytes)} ({free_bytes:,} bytes) are "
            f"free: {parts}. Free memory, lower --max-model-len, --max-num-batched-tokens or "
            "--kv-cache-memory-bytes, or serve a smaller or quantised checkpoint."
        )
    logger.info(
        "Memory: at least %s is needed, %s is free. Needed: %s",
        format_size(needs.total),
        format_size(free_bytes),
        parts,
    )


def estimate_activation_bytes(config: VllmConfig) -> int:
    """Return about what the largest step's intermediate values take.

    Within 1.3 of what a step of 512 and one of 2,048 tokens took of a DeepSeek-V4 of hidden size
    2,048, from above. Fields that config.json lacks count as nothing.
    """
    raw = config.model_config.hf_config
    text = raw.get("text_config")
    fields: Mapping[str, Any] = text if isinstance(text, dict) else raw
    hidden = _read(fields, "hidden_size")
    heads = _read(fields, "num_attention_heads")
    head_dim = max(_read(fields, "head_dim"), _read(fields, "global_head_dim"))
    head_values = heads * (head_dim or hidden // max(heads, 1))
    layer_inputs = _read(fields, "num_hidden_layers") * _read(fields, "hidden_size_per_layer_input")
    num_chosen = _read(fields, "num_experts_per_tok")
    inner = _read(fields, "moe_intermediate_size") or _read(fields, "intermediate_size")
    vocab = _read(fields, "vocab_size")
    per_token = (
        _NUM_STREAM_COPIES * hidden * max(_read(fields, "hc_mult"), 1)
        + _NUM_HEAD_COPIES * head_values
        + _NUM_LAYER_INPUT_COPIES * layer_inputs
        + _NUM_EXPERT_ROW_COPIES * (num_chosen * hidden + (num_chosen + 1) * 2 * inner)
    )
    num_values = per_token * _num_step_tokens(config)
    num_values += _NUM_LOGIT_COPIES * config.scheduler_config.max_num_seqs * vocab
    if raw.get("quantization_config"):
        num_values += min(_MAX_TILE_VALUES, hidden * max(head_values, 2 * inner, vocab))
    return _FP32_BYTES * num_values


def _num_step_tokens(config: VllmConfig) -> int:
    scheduler = config.scheduler_config
    longest = config.model_config.max_model_len * scheduler.max_num_seqs
    return min(scheduler.max_num_batched_tokens, longest)


def _read(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    return value if isinstance(value, int) else 0
