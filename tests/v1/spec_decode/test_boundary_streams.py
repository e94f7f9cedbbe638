"""Streams by block, the longest unused dropped first."""

import torch

from vllm.v1.spec_decode.boundary_streams import BoundaryStreams


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, 3)


def value_of(store: BoundaryStreams, block_id: int) -> float | None:
    found = store.find(block_id)
    if found is None:
        return None
    assert found.shape == (2, 3)
    assert (found == found[0, 0]).all()
    return float(found[0, 0])


def test_a_later_row_of_a_block_replaces_the_earlier() -> None:
    store = BoundaryStreams()
    assert store.find(4) is None
    store.save([4, 5, 4], rows(1, 2, 3))
    assert (value_of(store, 4), value_of(store, 5)) == (3, 2)
    store.save([5], rows(7))
    assert (value_of(store, 5), len(store)) == (7, 2)


def test_the_longest_unused_goes_first() -> None:
    store = BoundaryStreams(max_bytes=3 * 2 * 3 * 4)
    store.save([1, 2, 3], rows(1, 2, 3))
    assert value_of(store, 1) == 1
    store.save([4], rows(4))
    assert [value_of(store, block) for block in (1, 2, 3, 4)] == [1, None, 3, 4]
    store.save([], rows())
    assert len(store) == 3


def test_more_rows_at_once_than_fit() -> None:
    store = BoundaryStreams(max_bytes=1)
    store.save([1, 2, 3], rows(1, 2, 3))
    assert [value_of(store, block) for block in (1, 2, 3)] == [None, None, 3]
