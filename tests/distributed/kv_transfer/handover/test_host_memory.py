"""Regions as bytes of the pool: exactly the rows that are named, in both layouts."""

import pytest
import torch

from vllm.distributed.kv_transfer.handover.host_memory import HostMemory
from vllm.distributed.kv_transfer.handover.regions import Region
from vllm.distributed.kv_transfer.handover.staged_memory import StagedMemory
from vllm.v1.core.geometry import GroupGeometry
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

# Two layers of a group with a row per two tokens, four rows a block.
GROUP = GroupGeometry(0, is_window=False, block_size=8, ratio=2)
SPEC = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype=torch.bfloat16)
LAYERS = [KVCacheGroupSpec(["a", "b"], SPEC)]


def make_views(*, is_packed: bool) -> dict[str, torch.Tensor]:
    """Views ``[5, 4, 3]`` of bfloat16 whose values say where they are."""
    if is_packed:
        # A page takes 24 bytes of the 64 in which it is padded.
        pool = torch.zeros(5, 128, dtype=torch.uint8).view(-1).view(torch.bfloat16)
        views = {
            name: pool.as_strided((5, 4, 3), (64, 3, 1), 32 * i) for i, name in enumerate("ab")
        }
    else:
        views = {name: torch.zeros(5, 4, 3, dtype=torch.bfloat16) for name in "ab"}
    for offset, name in enumerate("ab"):
        values = torch.arange(60).view(5, 4, 3) + 100 * offset
        views[name].copy_(values.to(torch.bfloat16))
    return views


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("first", "end"), [(16, 24), (16, 18), (20, 24), (18, 22)])
def test_the_bytes_are_those_of_the_rows(is_packed: bool, first: int, end: int) -> None:
    views = make_views(is_packed=is_packed)
    memory = HostMemory(views, LAYERS, [GROUP])
    pieces = memory.source(Region(0, 2, first, end), block_id=3)
    found = b"".join(bytes(piece) for piece in pieces)
    rows = slice((first - 16) // 2, (end - 16) // 2)
    wanted = [bytes(views[n][3, rows].contiguous().view(torch.uint8).flatten()) for n in "ab"]
    if is_packed and (first, end) == (16, 24):
        # Whole pages of one block go in one piece, with the padding between them.
        assert len(pieces) == 1
        assert found[:24] == wanted[0]
        assert found[64:88] == wanted[1]
    else:
        assert found == b"".join(wanted)


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_is_received_is_where_the_model_reads_it(is_packed: bool) -> None:
    giving, taking = make_views(is_packed=is_packed), make_views(is_packed=is_packed)
    for view in taking.values():
        view.zero_()
    source = HostMemory(giving, LAYERS, [GROUP]).source(Region(0, 2, 18, 24), 3)
    memory = HostMemory(taking, LAYERS, [GROUP])
    target = memory.target(Region(0, 2, 18, 24), 1)
    for piece, other in zip(target, source, strict=True):
        piece[:] = other
    for name, view in taking.items():
        assert torch.equal(view[1, 1:], giving[name][3, 1:])
        view[1, 1:] = 0
        assert not view.any(), "no other row may change"


@pytest.mark.parametrize("is_packed", [True, False])
def test_staged_rows_are_written_when_they_are_verified(is_packed: bool) -> None:
    giving, taking = make_views(is_packed=is_packed), make_views(is_packed=is_packed)
    for view in taking.values():
        view.zero_()
    region = Region(0, 2, 18, 24)
    source = StagedMemory(giving, LAYERS, [GROUP]).source(region, 3)
    host = HostMemory(giving, LAYERS, [GROUP]).source(region, 3)
    assert b"".join(map(bytes, source)) == b"".join(map(bytes, host))
    memory = StagedMemory(taking, LAYERS, [GROUP])
    target = memory.target(region, 1)
    for piece, other in zip(target, source, strict=True):
        piece[:] = other
    assert not any(view.any() for view in taking.values())
    memory.commit(region, 1, target)
    for name, view in taking.items():
        assert torch.equal(view[1, 1:], giving[name][3, 1:])
        view[1, 1:] = 0
        assert not view.any(), "no other row may change"
