"""DeepSeek-V4's KV cache groups on Ascend: what they must look like, and what boundaries keep.

Lookup, allocation, publication and eviction are the core's, by its one rule of hits. This class
decides what it works on:

    group                     kept below a boundary P
    C4 + index keys, C128     dense: every row, a group of unequal pages as one
    window                    rows P - 127 .. P - 1
    window with MTP's layer   one row more: P - 128
    C4, C128 state            rows of the entry that is still open

Why MTP's layer has one more, and what it costs: ``vllm_ascend.core.masks``.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from vllm.exceptions import ConfigError
from vllm.v1.core.kv_cache_coordinator import CheckpointCoordinator
from vllm.v1.core.values.cache_settings import CacheSettings
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm_ascend.core import masks
from vllm_ascend.core.specs import unpack_groups

_MAX_LISTED = 4


class AscendHybridKVCacheCoordinator(CheckpointCoordinator):
    """The groups of a DeepSeek-V4 over one pool.

    Args:
        settings: Groups, sizes and switches; ``hit_unit`` is set.
        local_kv_retention_interval: Tokens between kept boundaries, or a policy's name; None: the
            config's.
        scheduler_block_size: Tokens on whose multiples hits end; None: the settings'. There is one
            prefix block size, so it is the unit.
        eagle_attn_layer_names: The drafter's caches; None: those of groups that are flagged.

    Raises:
        ConfigError: The groups are not DeepSeek-V4's in Ascend's pages, the sizes contradict each
            other, or a drafter's cache is in no group.
    """

    def __init__(
        self,
        settings: CacheSettings,
        *,
        local_kv_retention_interval: int | str | None = None,
        scheduler_block_size: int | None = None,
        eagle_attn_layer_names: Collection[str] | None = None,
    ) -> None:
        config = settings.kv_cache_config
        size = scheduler_block_size or settings.scheduler_block_size
        if size != config.hit_unit:
            raise ConfigError(
                f"scheduler_block_size={size} and the hit unit {config.hit_unit} must be the same "
                "number on Ascend: a DeepSeek-V4 has one prefix block size, --block-size."
            )
        if eagle_attn_layer_names is not None:
            config = _flag_drafter(config, eagle_attn_layer_names)
        if local_kv_retention_interval is not None:
            config = replace(config, prefix_cache_retention_interval=local_kv_retention_interval)
        super().__init__(
            replace(settings, kv_cache_config=self.arrange(config), scheduler_block_size=size)
        )

    @classmethod
    def arrange(cls, config: KVCacheConfig) -> KVCacheConfig:
        """Return the config with the rows that boundaries keep of each group.

        Raises:
            ConfigError: The groups are not DeepSeek-V4's in Ascend's pages.
        """
        assert config.hit_unit is not None
        _check_groups(config.kv_cache_groups, config.hit_unit)
        groups = [
            replace(group, extra_rows=cls.num_extra_rows(group)) for group in config.kv_cache_groups
        ]
        _check_kept(groups, config.hit_unit)
        return replace(config, kv_cache_groups=groups)

    @classmethod
    def num_extra_rows(cls, group: KVCacheGroupSpec) -> int:
        """Return the rows that a boundary keeps of a group below those that going on there reads.

        One in the window group of the drafter, by ``masks.num_extra_rows``. Siblings of its spec
        keep what they need. A subclass may keep more.
        """
        is_window = all(spec.has_checkpoints for spec in group.kv_cache_spec.members())
        return masks.num_extra_rows(is_window=is_window, serves_drafter=group.is_eagle_group)


def _flag_drafter(config: KVCacheConfig, names: Collection[str]) -> KVCacheConfig:
    """Return the config with the groups of these caches flagged as the drafter's, and no other."""
    groups = config.kv_cache_groups
    unknown = sorted(set(names).difference(*(group.layer_names for group in groups)))
    if unknown:
        raise ConfigError(
            f"eagle_attn_layer_names has {len(unknown)} names that are in no KV cache group: "
            f"{', '.join(unknown[:_MAX_LISTED])}."
        )
    flagged = [
        replace(group, is_eagle_group=not set(names).isdisjoint(group.layer_names))
        for group in groups
    ]
    return replace(config, kv_cache_groups=flagged)


def _check_groups(groups: Sequence[KVCacheGroupSpec], unit: int) -> None:
    """Refuse groups whose blocks do not store one unit of rows, or whose padded pages do not fit.

    Kernels see a state page through the tensor of the row page or index page that it shares a slot
    with: its size must be one of theirs.

    Raises:
        ConfigError: Names the group, what it has and what it should have.
    """
    page_sizes = set()
    padded: dict[str, int] = {}
    for group_id, group in enumerate(unpack_groups(groups)):
        spec = group.kv_cache_spec
        if not spec.keeps_every_token and not spec.has_checkpoints:
            raise ConfigError(
                f"KV cache group {group_id} ({spec.label}: {_list(group.layer_names)}) is none of "
                "DeepSeek-V4's on Ascend: compressed entries, windows or compressor states."
            )
        if spec.keeps_every_token and spec.storage_block_size != unit:
            raise ConfigError(
                f"KV cache group {group_id} ({spec.label}: {_list(group.layer_names)}) stores "
                f"{spec.storage_block_size} rows in a block of {spec.block_size} tokens; pages of "
                f"rows are shared, so every compressed group stores --block-size ({unit}) of them."
            )
        for name, own in groups[group_id].layer_specs().items():
            if own.keeps_every_token:
                page_sizes.add(own.page_size_bytes)
            elif own.page_size_bytes != own.page_layout().num_bytes:
                padded[name] = own.page_size_bytes
    odd = [name for name, size in padded.items() if size not in page_sizes]
    if odd:
        sizes = sorted({padded[name] for name in odd})
        raise ConfigError(
            f"{len(odd)} state pages of {sizes} bytes share no slot with pages of "
            f"{sorted(page_sizes)} bytes: {_list(odd)}."
        )


def _check_kept(groups: Sequence[KVCacheGroupSpec], unit: int) -> None:
    """Compare what boundaries keep with the masks, up to where both repeat.

    Raises:
        ConfigError: Names the group, the boundary and a block that would be missing there.
    """
    for group_id, group in enumerate(groups):
        own = group.geometry(group_id, unit)
        for boundary in (
            range(unit, 2 * (own.keep + own.align + unit), unit) if own.is_window else ()
        ):
            kept = own.rows_below(boundary)
            wanted = masks.kept_block_mask(own, (boundary,), kept.stop)
            missing = [
                index for index, is_kept in enumerate(wanted) if is_kept and index not in kept
            ]
            if missing:
                raise ConfigError(
                    f"KV cache group {group_id} ({_list(group.layer_names)}) keeps the rows from "
                    f"{own.first_needed(boundary)} on below a boundary at {boundary}, and going on "
                    f"there reads rows from {masks.kept_rows(own, boundary).start} on: "
                    "num_extra_rows() returns too few."
                )


def _list(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
