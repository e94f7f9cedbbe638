"""Tables in one buffer: where they lie, and what is behind them."""

import numpy as np
import pytest
import torch

from vllm.v1.attention.table_buffer import TableBuffer, TableColumns

CPU = torch.device("cpu")


def make_columns(values: list[int], ids: list[int]) -> TableColumns:
    columns = TableColumns()
    columns.add(np.array([7]), 1)
    columns.add(np.array(values, dtype=np.int64), 4)
    columns.add_ids([np.array(ids, dtype=np.int64)])
    return columns


def test_columns_lie_where_the_last_ones_lay() -> None:
    buffer = TableBuffer(CPU)
    buffer.reserve(make_columns([], []).count_values(3))
    first, first_ids = buffer.upload(make_columns([1, 2, 3, 4], [5, 6]))
    assert [column.tolist() for column in first] == [[7], [1, 2, 3, 4]]
    assert first_ids[:3].tolist() == [5, 6, 0]
    # A graph that read the first ones finds these, and numbers of nothing behind them.
    second, second_ids = buffer.upload(make_columns([8], [9, 9, 9]))
    assert [column.data_ptr() for column in first] == [column.data_ptr() for column in second]
    assert first[1].tolist() == [8, -1, -1, -1]
    assert first_ids[:4].tolist() == second_ids[:4].tolist() == [9, 9, 9, 0]


def test_what_graphs_read_does_not_move() -> None:
    buffer = TableBuffer(CPU)
    buffer.upload(make_columns([1], []))
    buffer.fix()
    buffer.upload(make_columns([1, 2, 3, 4], [5, 6]))
    with pytest.raises(AssertionError, match="graphs read tables of 8 values"):
        buffer.upload(make_columns([1], [5, 6, 7]))
    with pytest.raises(AssertionError, match="5 values of a column of 4"):
        make_columns([1, 2, 3, 4, 5], [])
