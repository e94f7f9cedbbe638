"""Block tables: dense ones append, window ones are replaced, views stay valid."""

import random

import numpy as np

from vllm.v1.core.values.cache_step import WindowTable
from vllm.v1.worker.block_table import GroupBlockTable, RequestBlockTables


def test_random_appends_and_replacements() -> None:
    rng = random.Random(0)
    table = GroupBlockTable()
    base, expected = 0, []
    for _ in range(300):
        ids = [rng.randint(1, 999) for _ in range(rng.randint(0, 40))]
        if rng.random() < 0.1:
            base, expected = rng.randint(0, 50), ids
            table.replace(base, ids)
        else:
            expected = expected + ids
            table.append(ids)
        assert table.view.base == base
        assert table.view.block_ids.dtype == np.int64
        assert table.view.block_ids.tolist() == expected


def test_a_view_handed_out_does_not_change() -> None:
    table = GroupBlockTable([1, 2])
    old = table.view
    table.append([3])
    table.append(range(4, 100))
    middle = table.view
    table.replace(7, [5])
    assert old.block_ids.tolist() == [1, 2]
    assert middle.block_ids.tolist() == list(range(1, 100))


def test_views_are_rebuilt_only_on_a_change() -> None:
    tables = RequestBlockTables(3)
    tables.replace_all(([1, 2], [], []))
    tables.replace_windows([WindowTable(2, 4, [9, 0, 8])])
    views = tables.views
    assert [view.base for view in views] == [0, 0, 4]
    assert [view.block_ids.tolist() for view in views] == [[1, 2], [], [9, 0, 8]]
    tables.append_all(([], [], []))
    assert tables.views is views
    tables.append_all(([3], [], []))
    assert tables.views is not views
    assert tables.views[0].block_ids.tolist() == [1, 2, 3]
    assert tables.views[2] is views[2]
    tables.clear()
    assert all(len(view.block_ids) == 0 for view in tables.views)
