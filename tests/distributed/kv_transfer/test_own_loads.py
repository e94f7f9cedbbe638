"""Loads that are nobody's: what came can be hit, what did not leaves nothing."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from vllm.distributed.kv_transfer.own_loads import OwnLoads, stand_in

UNIT = 16
LOCAL: Any = SimpleNamespace(num_tokens=UNIT, blocks=("b",))


def test_a_stand_in_has_a_token_more_than_its_prefix() -> None:
    request = stand_in("x", [b"a" * 32, b"b" * 32], UNIT, {2 * UNIT: 5.0})
    assert request.num_prompt_tokens == 2 * UNIT + 1
    assert request.block_hashes == [b"a" * 32, b"b" * 32]
    assert request.cache_ttls == {2 * UNIT: 5.0}
    assert stand_in("x", [], UNIT).cache_ttls == {}


@pytest.mark.parametrize("is_rows_alone", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_what_came_is_published_once(is_rows_alone: bool, has_failed: bool) -> None:
    manager = Mock()
    loads = OwnLoads(manager)
    request = stand_in("x", [b"a" * 32] * 3, UNIT)
    blocks = loads.begin(request, LOCAL, 3 * UNIT, 7, is_rows_alone=is_rows_alone)
    assert blocks is manager.coordinator.find_import.return_value
    manager.coordinator.find_import.assert_called_once_with(request, 3 * UNIT, 2 * UNIT, 7)
    assert loads.is_loading("x")
    assert loads.settle("y", has_failed=False) is None
    assert loads.settle("x", has_failed=has_failed) == (0 if has_failed else 3 * UNIT)
    assert not loads.is_loading("x")
    assert loads.settle("x", has_failed=has_failed) is None
    publish, other = manager.cache_blocks, manager.cache_rows
    if is_rows_alone:
        publish, other = other, publish
    assert publish.call_count == (not has_failed)
    other.assert_not_called()
    manager.free.assert_called_once_with(request)


def test_without_room_there_is_no_load() -> None:
    manager = Mock()
    manager.allocate_slots.return_value = None
    loads = OwnLoads(manager)
    assert loads.begin(stand_in("x", [b"a" * 32], UNIT), LOCAL, 2 * UNIT) is None
    assert not loads.is_loading("x")
    manager.free.assert_not_called()
