"""Which windows are pinned at the places where long prompts pause (``VLLM_PIN_SWA_TOKENS``)."""

from dataclasses import dataclass

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class PinSettings:
    """What long steps pin.

    Attributes:
        share: The part of the pool that may stand under pins.
        min_drop_blocks: Blocks of rows a step must compute and not keep, in some group, to pin.
    """

    share: float
    min_drop_blocks: int = 16


def pinned_share(kv_cache_config: KVCacheConfig) -> float:
    """Return the share of a pool that pins may hold: the config's, else the environment's."""
    share = kv_cache_config.prefix_cache_pinned_share
    return envs.VLLM_PIN_MAX_SHARE if share is None else share


def resolve_pins(kv_cache_config: KVCacheConfig) -> PinSettings | None:
    """Return what the environment wants pinned; None: nothing."""
    if not envs.VLLM_PIN_SWA_TOKENS:
        return None
    return PinSettings(pinned_share(kv_cache_config), envs.VLLM_PIN_MIN_DROP_SIZE)


def log_pins(pinning: PinSettings, num_blocks: int, window_blocks: int, num_tokens: int) -> None:
    """Say at start-up what pins are good for, and by which variables.

    Args:
        pinning: What long steps pin.
        num_blocks: Blocks of the pool, the null block left out.
        window_blocks: Blocks that one pin covers.
        num_tokens: Tokens of prompts that the pool holds, windows left out; 0: any number.
    """
    max_pinned = int(num_blocks * pinning.share)
    num_prefixes = max_pinned // window_blocks if window_blocks else 0
    if envs.is_set("VLLM_PIN_PREFIX_BLOCKS"):
        logger.warning(
            "VLLM_PIN_PREFIX_BLOCKS is an earlier spelling: it is taken as VLLM_PIN_SWA_TOKENS, "
            "which beats it. Full-attention blocks are not pinned; see docs/prefix_cache.md."
        )
    logger.info(
        "Pins (VLLM_PIN_SWA_TOKENS=1, VLLM_PIN_MIN_DROP_SIZE=%d, a share of %g by "
        "--prefix-cache-pinned-share or VLLM_PIN_MAX_SHARE) cover up to %d of %d blocks: of "
        "windows alone, room for %d prefixes of %d blocks each%s",
        pinning.min_drop_blocks,
        pinning.share,
        max_pinned,
        num_blocks,
        num_prefixes,
        window_blocks,
        f"; the pool holds {num_tokens:,} tokens" if num_tokens else "",
    )


def num_dropped_blocks(geometry: CacheGeometry, start: int, end: int) -> int:
    """Return how many blocks of rows a step computes and does not keep, in some window group.

    In a private prefill window such rows never take a block, but count as if they did. The group
    with the smallest blocks decides for all, because a checkpoint is pinned as a whole or not at
    all. A decode step drops one block at most; what earlier steps kept does not count, because a
    compressor drops its whole open window in the one step that closes it.

        window 128, blocks of 32    start 256           end 1024
        rows       ....................|....................
                                      256         897   1024
        blocks                         8 . . . . . 28 29 30 31     dropped: 8..27, 20 blocks
                                                 |- window -|
    """
    return max(
        (
            max(0, group.first_needed(end) // group.block_size - start // group.block_size)
            for group in geometry.windows
        ),
        default=0,
    )
