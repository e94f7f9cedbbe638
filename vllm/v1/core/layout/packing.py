"""From a hybrid model's caches to KV cache groups and bytes in one packed pool.

Layers whose cache moves together form a group: same kind, block size and window
(``KVCacheSpec.packing_key``). One block pool serves all groups, so a block id names one row of a
byte tensor ``[num_blocks, block_stride]``, and each group lays its layers' pages out in that row:

    block row     |<------------------------- block_stride ------------------------->|
    C4 group      | entries L1 | indexer L1 | entries L3 | indexer L3 | ...           |
    window group  | window L0      | window L2      | ...                   |  unused |
    C128 state    | state L2   | state L4   |                              |  unused |

The stride is that of the widest group. A group of many layers (the window of every layer) is split
until no part is wider than the widest group that grows with the context, because the stride is paid
by every block of every group.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from vllm.exceptions import ConfigError
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_specs.base import PackingKey

# Views of a page as wide elements must start aligned; a cache line also keeps rows apart.
PAGE_ALIGNMENT_BYTES = 64


def _padded(num_bytes: int) -> int:
    return cdiv(num_bytes, PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES


def padded_page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes that a layer's page takes of a row."""
    return _padded(spec.page_size_bytes)


def _width_bytes(specs: Mapping[str, KVCacheSpec], names: Sequence[str]) -> int:
    return sum(_padded(specs[name].page_size_bytes) for name in names)


def _make_group(specs: Mapping[str, KVCacheSpec], names: Sequence[str]) -> KVCacheGroupSpec:
    members = {name: specs[name] for name in names}
    first = specs[names[0]]
    if all(spec == first for spec in members.values()):
        return KVCacheGroupSpec(list(names), first)
    return KVCacheGroupSpec(list(names), UniformTypeKVCacheSpecs(first.block_size, members))


def group_for_packing(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Group the caches of a model whose pages are of different sizes, to share packed rows.

    Args:
        specs: Cache name to spec; the order of layers is kept inside a group.

    Returns:
        Dense groups by compress ratio, then window groups, then compressor-state groups. For
        DeepSeek-V4: C4 with its indexer, C128, two window groups, C4 state, C128 state.

    Raises:
        ConfigError: A spec is of no kind that can share the pool.
    """
    buckets: dict[PackingKey, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        try:
            buckets[spec.packing_key()].append(name)
        except ConfigError as error:
            raise ConfigError(f"Layer {name}: {error}.") from error
    dense_widths = [_width_bytes(specs, names) for key, names in buckets.items() if key[0] == 0]
    widest = max(dense_widths, default=0)
    groups = []
    for key in sorted(buckets):
        names = buckets[key]
        num_parts = 1
        if widest and key[0] != 0:
            num_parts = min(len(names), cdiv(_width_bytes(specs, names), widest))
        groups += [_make_group(specs, names[part::num_parts]) for part in range(num_parts)]
    return groups


def _page_bytes(group: KVCacheGroupSpec) -> list[tuple[str, int]]:
    return [(name, spec.page_size_bytes) for name, spec in group.layer_specs().items()]


def packed_block_stride(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes one block id costs: the padded pages of the widest group."""
    return max((sum(_padded(size) for _, size in _page_bytes(g)) for g in groups), default=0)


def build_packed_tensors(
    groups: Sequence[KVCacheGroupSpec],
    available_memory: int,
    num_blocks_override: int | None = None,
) -> tuple[int, list[KVCacheTensor]]:
    """Size the pool and place every layer's page in a block row.

    Args:
        groups: The model's groups.
        available_memory: Bytes the pool may take.
        num_blocks_override: Exact number of blocks; wins over ``available_memory``.

    Returns:
        The number of blocks and the pool as one tensor (none for a model without caches).
    """
    stride = packed_block_stride(groups)
    if stride == 0:
        return 1, []
    num_blocks = num_blocks_override
    if num_blocks is None:
        num_blocks = max(available_memory, 0) // stride
    offsets: dict[str, int] = {}
    for group in groups:
        position = 0
        for name, size in _page_bytes(group):
            offsets[name] = position
            position += _padded(size)
    tensor = KVCacheTensor(
        size=num_blocks * stride, shared_by=list(offsets), offsets=offsets, block_stride=stride
    )
    return num_blocks, [tensor]
