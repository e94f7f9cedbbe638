"""A cache kind of no suffix of rows: a recurrent state, which stands for all tokens before it.

All that the product is told of it is this one class; ``test_toy_kind.py`` serves it. A state is
larger than the page of an attention layer, so it is cut into pieces, a block each, and does not
widen the pool's rows:

    tokens     0 ............ 32 ............ 64 .... 70         unit 32, four pieces
    attention  every row
    states     .............. [0 1 2 3]                          of the checkpoint at 64: after 63
               .............................. [0 1 2 3]          of the request at 70: after 69
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.v1.core.specs import FLOAT, full
from vllm.v1.core.layout.packing import build_packed_tensors, group_for_packing
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheSpecKind
from vllm.v1.kv_cache_specs.base import PackingKey
from vllm.v1.kv_cache_specs.geometry import GroupGeometry, check_block_size
from vllm.v1.kv_cache_specs.layouts import PageLayout


@dataclass(frozen=True, kw_only=True)
class RecurrentStateSpec(KVCacheSpec):
    """A state of fixed size per layer.

    Attributes:
        num_values: Values of a state.
        num_pieces: Blocks that hold one state.
        dtype: Of a value.
    """

    kind: ClassVar[KVCacheSpecKind] = KVCacheSpecKind.MAMBA
    has_checkpoints: ClassVar[bool] = True
    needs_packed_pool: ClassVar[bool] = True

    num_values: int
    num_pieces: int
    dtype: Any

    @property
    def label(self) -> str:
        return "recurrent state"

    @property
    def page_size_bytes(self) -> int:
        return self.num_values // self.num_pieces * int(self.dtype.itemsize)

    def max_memory_usage_bytes(self, vllm_config: object) -> int:
        # The state that the last step left, and the one that this step writes.
        return 2 * self.num_pieces * self.page_size_bytes

    def geometry(self, group_id: int, unit: int) -> GroupGeometry:
        check_block_size(group_id, self.block_size, unit, is_window=True)
        return GroupGeometry(
            group_id,
            True,
            self.block_size,
            align=self.block_size,
            is_recurrent=True,
            num_pieces=self.num_pieces,
        )

    def packing_key(self) -> PackingKey:
        return (2, self.num_values, self.block_size, self.kind)

    def page_layout(self) -> PageLayout:
        return PageLayout(1, self.num_values // self.num_pieces, self.dtype)


def toy_specs(unit: int, num_pieces: int) -> dict[str, KVCacheSpec]:
    """Two layers of attention, whose blocks are two units long, and six of states."""
    specs: dict[str, KVCacheSpec] = {}
    for i in range(8):
        if i % 4 == 3:
            specs[f"layers.{i}.attn"] = full(block_size=2 * unit, num_kv_heads=1, head_size=16)
        else:
            specs[f"layers.{i}.state"] = RecurrentStateSpec(
                block_size=unit,
                num_values=num_pieces * unit * 32,
                num_pieces=num_pieces,
                dtype=FLOAT,
            )
    return specs


def toy_config(unit: int, num_blocks: int, num_pieces: int = 4) -> KVCacheConfig:
    """A KV cache config that hits at one unit."""
    groups = group_for_packing(toy_specs(unit, num_pieces))
    blocks, tensors = build_packed_tensors(groups, 0, num_blocks)
    return KVCacheConfig(blocks, tensors, groups, hit_unit=unit)
