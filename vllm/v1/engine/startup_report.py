"""The log lines that tell what was started and which values were derived."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.engine.wire import KVCacheInfo

logger = init_logger(__name__)


def report_model(vllm_config: VllmConfig) -> None:
    """Say which model will be served, before its weights load."""
    model = vllm_config.model_config
    logger.info(
        "Model %s (%s) from %s, dtype %s.",
        model.served_model_name,
        ", ".join(model.architectures) or "unknown architecture",
        "this package" if model.is_embedded else model.path or model.model,
        model.dtype,
    )
    if model.is_embedded:
        logger.info(
            "This is the small checkpoint embedded in the package: it looks up facts told in its "
            "context and talks a little (docs/embedded_model.md). Give a folder or a hub id to "
            "serve a real model."
        )
    if vllm_config.load_config.load_format == "dummy":
        logger.warning("Load format 'dummy': the weights are random, the answers are noise.")


def report_start(vllm_config: VllmConfig, kv_cache: KVCacheInfo, load_s: float) -> None:
    """Say what the engine can hold and which limits it works with."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    logger.info(
        "KV cache size: %s tokens (%s blocks, %.3f GiB), %s bytes a token in rows of %s.",
        f"{kv_cache.capacity_tokens:,}",
        f"{kv_cache.num_blocks:,}",
        kv_cache.capacity_bytes / GiB_bytes,
        f"{kv_cache.capacity_bytes // max(1, kv_cache.capacity_tokens):,}",
        model.dtype if cache_dtype == "auto" else cache_dtype,
    )
    if cache_dtype in ("float16", "half"):
        logger.info("Rows of float16 keep values beyond 65,504 as that.")
    if cache_dtype == "int8":
        logger.info(
            "Rows of int8 hold keys and values by head, each under a scale of its own; keys are "
            "divided by sizes of their channels, measured on this model's weights. What else is "
            "cached is float32."
        )
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{kv_cache.max_model_len:,}",
        kv_cache.max_concurrency,
    )
    logger.info(
        "KV cache geometry: one prefix hash covers %d tokens; groups: %s.",
        kv_cache.unit,
        "; ".join(
            f"{group.kind} of {group.num_layers} caches, blocks of {group.block_size} tokens"
            + (f", window {group.sliding_window}" if group.sliding_window else "")
            for group in kv_cache.groups
        )
        or "none",
    )
    if kv_cache.smallest_reusable_prefix is None:
        logger.info("Prefix caching is off.")
    else:
        logger.info(
            "Smallest reusable prefix: %d tokens. Kept for reuse: %s.",
            kv_cache.smallest_reusable_prefix,
            kv_cache.retention,
        )
    if kv_cache.checkpoint_tokens is not None:
        logger.info(
            "Full-attention rows: %s bytes a token. A checkpoint (what resuming at one place needs "
            "beside these: windows, states): %s bytes, in the room of %s tokens' rows%s.",
            f"{kv_cache.dense_token_bytes:,}",
            f"{kv_cache.checkpoint_bytes:,}",
            f"{kv_cache.checkpoint_tokens:,}",
            _describe_partial(kv_cache),
        )
    _report_kv_events(vllm_config)
    derived = " (derived)" if model.original_max_model_len in (None, -1) else ""
    logger.info(
        "Limits: max_model_len=%d%s, max_num_seqs=%d, max_num_batched_tokens=%d, "
        "chunked prefill %s, policy %s.",
        model.max_model_len,
        derived,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        "on" if scheduler.enable_chunked_prefill else "off",
        scheduler.policy,
    )
    logger.info("Model loaded in %.2f s.", load_s)


def _describe_partial(kv_cache: KVCacheInfo) -> str:
    tokens, num_bytes = kv_cache.partial_checkpoint_tokens, kv_cache.partial_checkpoint_bytes
    if tokens is None:
        return ""
    return (
        "; inside a prompt, without layers that compute its end alone: "
        f"{num_bytes:,} bytes, of {tokens:,}"
    )


def _report_kv_events(vllm_config: VllmConfig) -> None:
    events = vllm_config.kv_events_config
    if events is None or not events.publishes:
        return
    logger.info(
        "KV events: published on %s, topic %r, replay %s.",
        events.endpoint,
        events.topic,
        f"on {events.replay_endpoint}" if events.replay_endpoint else "off",
    )
