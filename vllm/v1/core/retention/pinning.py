"""Which windows are pinned at the places where long prompts pause (``VLLM_PIN_SWA_TOKENS``)."""

from dataclasses import dataclass

from vllm import envs
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.kv_cache_interface import KVCacheConfig


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
