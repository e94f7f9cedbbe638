"""From layers to KV cache groups: which layers share one block table.

A block id addresses the same page in every group's tensors, so all groups of a model need equal
page sizes (models with compressed and sliding-window latents apart, see packing). Groups of
equal size waste nothing; the rules below trade a little padding for few groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.layout.packing import group_for_packing
from vllm.v1.core.layout.unequal_widths import group_unequal_widths
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# The largest bucket may set the group size while the padding it causes stays below half.
_MAX_PADDING_FACTOR = 1.5


def is_kv_cache_spec_uniform(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether all layers merge into one spec (no layers: yes)."""
    if not kv_cache_spec:
        return True
    specs = list(kv_cache_spec.values())
    try:
        specs[0].merge(specs)
    except AssertionError:
        return False
    return True


def _is_one_type(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    return is_kv_cache_spec_uniform(kv_cache_spec) or UniformTypeKVCacheSpecs.is_uniform_type(
        kv_cache_spec
    )


def unify_hybrid_kv_cache_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Turn window and chunk layers into full attention, for use without the hybrid manager.

    Attention still masks by the window; only the memory saving is given up.

    Args:
        kv_cache_spec: Spec by layer.

    Mutates:
        ``kv_cache_spec``: entries are replaced.

    Raises:
        ConfigError: (a ValueError) The layers cannot be brought to one type.
    """
    if _is_one_type(kv_cache_spec):
        return
    logger.warning(
        "The hybrid KV cache manager is off: sliding-window and chunked layers keep every token."
    )
    if any(spec.keeps_every_token for spec in kv_cache_spec.values()):
        for name, spec in kv_cache_spec.items():
            kv_cache_spec[name] = spec.as_full_attention()
    if not _is_one_type(kv_cache_spec):
        kinds = sorted({type(spec).__name__ for spec in kv_cache_spec.values()})
        raise ConfigError(
            "The hybrid KV cache manager is disabled, but the KV cache specs of this model "
            f"({', '.join(kinds)}) cannot be converted into one type: enable it again (drop "
            "disable_hybrid_kv_cache_manager)."
        )


def unify_page_sizes(kv_cache_spec: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the specs with one page size: smaller pages get larger blocks.

    Raises:
        NotImplementedError: The largest page is no multiple of another.
    """
    largest = max(spec.page_size_bytes for spec in kv_cache_spec.values())
    unified: dict[str, KVCacheSpec] = {}
    for name, spec in kv_cache_spec.items():
        factor, rest = divmod(largest, spec.page_size_bytes)
        if rest:
            raise NotImplementedError(
                f"The KV cache page of layer {name} has {spec.page_size_bytes} bytes, which do "
                f"not divide the largest page's {largest}: no block size makes them equal."
            )
        unified[name] = spec if factor == 1 else spec.with_larger_page(factor)
    return unified


def _split_into_groups(kv_cache_spec: dict[str, KVCacheSpec]) -> list[list[str]]:
    """Cut each bucket of equal specs into groups of at most one common size.

    Models repeat a pattern of layer kinds, so the smallest bucket tells the repetitions. When all
    buckets are nearly as large the largest is taken: padding is cheaper than more groups.
    """
    buckets: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in kv_cache_spec.items():
        buckets[spec].append(name)
    sizes = [len(names) for names in buckets.values()]
    group_size = min(sizes)
    if max(sizes) < group_size * _MAX_PADDING_FACTOR:
        group_size = max(sizes)
    groups: list[list[str]] = []
    for spec, names in buckets.items():
        num_groups = cdiv(len(names), group_size)
        padding = num_groups * group_size - len(names)
        if padding:
            logger.warning(
                "%d %s layers are padded by %d to groups of %d: that share of their KV cache is "
                "not used.",
                len(names),
                type(spec).__name__,
                padding,
                group_size,
            )
        # Strided: with pipeline parallelism every stage then holds a part of every group.
        groups += [names[i::num_groups] for i in range(num_groups)]
    return groups


def _merged_groups(
    kv_cache_spec: dict[str, KVCacheSpec], groups: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    result = []
    for names in groups:
        specs = [kv_cache_spec[name] for name in names]
        result.append(KVCacheGroupSpec(list(names), specs[0].merge(specs)))
    return result


def needs_packed_pool(specs: Iterable[KVCacheSpec]) -> bool:
    """Whether any of these, or of their members, makes a model's caches share a packed pool."""
    return any(member.needs_packed_pool for spec in specs for member in spec.members())


def get_kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], *, hits_at_units: bool = False
) -> list[KVCacheGroupSpec]:
    """Group the layers of a model.

    Args:
        vllm_config: For ``disable_hybrid_kv_cache_manager``.
        kv_cache_spec: Spec by layer, of all workers.
        hits_at_units: Whether hits end at one unit, as in an engine: a window's block divides it,
            so it is not enlarged where pages are of unlike size.

    Mutates:
        ``kv_cache_spec``, when the hybrid manager is off.

    Returns:
        The groups; none for a model without KV cache.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        unify_hybrid_kv_cache_specs(kv_cache_spec)
    if not kv_cache_spec:
        return []
    if needs_packed_pool(kv_cache_spec.values()):
        return group_for_packing(kv_cache_spec)
    if is_kv_cache_spec_uniform(kv_cache_spec):
        return _merged_groups(kv_cache_spec, [list(kv_cache_spec)])
    uniform = UniformTypeKVCacheSpecs.from_specs(kv_cache_spec)
    if uniform is not None:
        return [KVCacheGroupSpec(list(kv_cache_spec), uniform)]
    if hits_at_units and (groups := group_unequal_widths(kv_cache_spec)) is not None:
        return groups
    kv_cache_spec = unify_page_sizes(kv_cache_spec)
    return _merged_groups(kv_cache_spec, _split_into_groups(kv_cache_spec))
