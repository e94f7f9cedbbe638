"""An engine's settings without its weights, and the scheduler they lead to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vllm.cachelab.sim.geometries import GEOMETRIES
from vllm.config import VllmConfig
from vllm.config.cache import CacheConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.retention import read_interval
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import ConfigError, PoolTooSmallError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.models.registry import read_architectures, resolve_model
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.utils.byte_sizes import parse_size
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.engine.kv_cache_setup import KVCachePlan, plan_kv_cache
from vllm.v1.worker.dtypes import resolve_cache_dtype

_GIB = 1 << 30
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class SimSettings:
    """What decides about a cache.

    Attributes:
        hf_config: The model's config.json.
        block_size: As ``--block-size``.
        dtype: Of the model.
        cache_dtype: Of cached rows; "auto": the model's.
        num_blocks: Of the pool; None: as ``pool_bytes`` says.
        pool_bytes: Of the pool.
        interval: As ``--prefix-cache-retention-interval``.
        pinned_share: As ``--prefix-cache-pinned-share``.
        enable_prefix_caching: Whether prefixes are kept.
        max_model_len: Longest request in tokens.
        scheduler: Fields of ``SchedulerConfig``.
        speculative: Fields of ``SpeculativeConfig``; None: no drafter.
        tier: The tiers' connector here ("class", as module:name) and its settings ("extra"); None:
            there is nothing behind the pool.
        parallel: Fields of ``ParallelConfig``: workers share the pages of a block, cores the tiers.
        images: How pictures are shown, as a record's header has it; None: none are.
        runs_towers: Whether steps run towers, and not somebody beside them.
    """

    hf_config: Mapping[str, Any]
    block_size: int = 32
    dtype: str = "bfloat16"
    cache_dtype: str = "auto"
    num_blocks: int | None = None
    pool_bytes: int = 8 * _GIB
    interval: str | int | None = "auto"
    pinned_share: float | None = None
    enable_prefix_caching: bool = True
    max_model_len: int = 131_072
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] | None = None
    tier: Mapping[str, Any] | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, int] | None = None
    runs_towers: bool = True

    def make_config(self) -> VllmConfig:
        """Return the configuration that a server of these settings has.

        Raises:
            ConfigError: They do not go together.
        """
        raw = dict(self.hf_config)
        architectures = read_architectures(raw)
        parsed = resolve_model(architectures).parse_config(raw)
        raw |= {
            "architectures": architectures,
            "vocab_size": parsed.vocab_size,
            "max_position_embeddings": max(parsed.max_position_embeddings, self.max_model_len),
        }
        speculative = self.speculative
        return VllmConfig(
            model_config=ModelConfig(
                "sim",
                hf_config=raw,
                max_model_len=self.max_model_len,
                **_image_settings(parsed, self.images),
            ),
            cache_config=CacheConfig(
                block_size=self.block_size,
                cache_dtype=self.cache_dtype,
                num_gpu_blocks_override=self.num_blocks,
                kv_cache_memory_bytes=self.pool_bytes,
                prefix_cache_retention_interval=self.interval,
                prefix_cache_pinned_share=self.pinned_share,
                enable_prefix_caching=self.enable_prefix_caching,
            ),
            scheduler_config=SchedulerConfig(
                max_model_len=self.max_model_len, **dict(self.scheduler)
            ),
            parallel_config=ParallelConfig(**dict(self.parallel)),
            speculative_config=None if speculative is None else SpeculativeConfig(**speculative),
            observability_config=ObservabilityConfig(log_stats=False),
            kv_transfer_config=None if self.tier is None else _make_transfer(self.tier),
        )

    def make_plan(self, config: VllmConfig) -> KVCachePlan:
        """Return the layout of the pool.

        Raises:
            ConfigError: The pool does not hold one request, or the block size does not fit.
        """
        entry = resolve_model(config.model_config.architectures)
        dtype, speculative = _DTYPES.get(self.dtype), config.speculative_config
        if dtype is None:
            raise ConfigError(f"dtype {self.dtype!r} is unknown: use {', '.join(_DTYPES)}.")
        num_ranks = config.parallel_config.tensor_parallel_size
        parsed = entry.parse_config(config.model_config.hf_config).for_drafts(
            speculative is not None and speculative.method == "mtp"
        )
        specs = entry.load_kv_cache_specs()(
            entry.cut_config(parsed, num_ranks),
            self.block_size,
            resolve_cache_dtype(self.cache_dtype, dtype),
            torch.float32,
        )
        try:
            plan = plan_kv_cache(config, [specs] * num_ranks, [self.pool_bytes] * num_ranks)
        except PoolTooSmallError as error:
            # The commands that simulate have none of a server's flags but this one.
            raise ConfigError(f"{error.fact} Raise --pool-gib.") from error
        geometry = CacheGeometry.from_config(plan.scheduler_config)
        if geometry.windows:
            # Refused here, by name, and not in the middle of a grid.
            read_interval(self.interval, geometry.unit)
        return plan

    def prepare(self, tells_events: bool = False) -> "SimBase":
        """Return what an engine of these settings is built from; several may share one.

        Args:
            tells_events: Whether somebody is told what enters and leaves the cache.

        Raises:
            ConfigError: They do not go together, or the pool does not hold one request.
        """
        config = self.make_config()
        if tells_events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        return SimBase(config, self.make_plan(config))

    def resized(self, num_blocks: int) -> "SimSettings":
        """Return the same settings with another pool."""
        return replace(self, num_blocks=num_blocks)


def _image_settings(parsed: Any, images: Mapping[str, int] | None) -> dict[str, Any]:
    """What a model's configuration says of pictures."""
    plan: ImagesPlan | None = getattr(parsed, "images", None)
    if plan is None or images is None:
        return {}
    return {
        "image_family": plan.family,
        "max_picture_tokens": images["tokens"],
        "pictures_are_whole": bool(images["are_whole"]),
        "picture_row_bytes": images["row_bytes"],
    }


@dataclass(frozen=True, slots=True)
class SimBase:
    """A resolved configuration and a layout of the pool, which no engine changes.

    Attributes:
        config: Of a server.
        plan: Of its pool.
    """

    config: VllmConfig
    plan: KVCachePlan


def disk_bytes_of(tier: Mapping[str, Any] | None) -> int | None:
    """Return what a cache folder may take; None: there is none, or it is not said."""
    folders = () if tier is None else tier["extra"].get("secondary_tiers") or ()
    for folder in folders:
        size = folder.get("max_size", folder.get("disk_capacity_bytes"))
        return None if size is None else parse_size("max_size", str(size))
    return None


def resize_disk(tier: Mapping[str, Any] | None, disk_bytes: int | None) -> Mapping[str, Any] | None:
    """Return settings of tiers with another size of the folder; None: with the same."""
    if tier is None or disk_bytes is None:
        return tier
    folders = [
        {**{k: v for k, v in folder.items() if k != "disk_capacity_bytes"}, "max_size": disk_bytes}
        for folder in tier["extra"].get("secondary_tiers") or ()
    ]
    return {**tier, "extra": {**tier["extra"], "secondary_tiers": folders}}


def _make_transfer(tier: Mapping[str, Any]) -> KVTransferConfig:
    module, _, name = str(tier["class"]).partition(":")
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config=dict(tier["extra"]),
    )


def block_bytes(plan: KVCachePlan) -> int:
    """Return what a block id costs in memory."""
    config = plan.worker_configs[0]
    return sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks


def find_hf_config(name: str) -> Mapping[str, Any]:
    """Return a config.json by name.

    Args:
        name: One of ``GEOMETRIES``, a config.json, a folder, a hub id or "deepseek-v4" (embedded).

    Raises:
        ConfigError: Nothing of that name can be had.
    """
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    path = Path(name)
    if path.is_file():
        return read_hf_config(str(path.parent))
    return read_hf_config(resolve_checkpoint(name, with_weights=False).path)
