"""Whole, rows alone, or not at all: what the measured rates say."""

import pytest

from vllm.distributed.kv_transfer.offloading.restoring import (
    Located,
    Restorable,
    Way,
    choose_way,
)
from vllm.v1.kv_offload.cells import ObjectKind
from vllm.v1.kv_offload.rates import Rates
from vllm.v1.kv_offload.records import Extent, ObjectKey, StoredObject


def _way(position: int, num_bytes: int, resumes_at: int, *, is_host: bool = False) -> Way:
    key = ObjectKey(ObjectKind.ROWS, bytes(16))
    entry = StoredObject(0, Extent(key, 1, num_bytes, ((0, 1),)), position, None)
    found = Restorable(position, (Located(entry, is_host),), ((0, position),), None)
    return Way(found, resumes_at)


def _rates(bytes_per_s: float = 1e9, tokens_per_s: float = 1e4) -> Rates:
    rates = Rates(bytes_per_s=bytes_per_s)
    rates.tokens_per_s = dict.fromkeys(range(20), tokens_per_s)
    return rates


WHOLE = _way(4096, 40_000_000, 4096)
ROWS = _way(7680, 50_000_000, 6912)
WIDE = _way(7680, 400_000_000, 6912)


@pytest.mark.parametrize(
    ("ways", "rates", "num_local", "expected"),
    [
        # Loading 40 MB takes 54 ms with its margin, 4,096 tokens 410.
        ([WHOLE], _rates(), 0, WHOLE),
        # Rows reach further, and cost 768 tokens less than they bring.
        ([WHOLE, ROWS], _rates(), 0, ROWS),
        # A slow disk: 40 MB take 5 s; computing all takes 0.8.
        ([WHOLE, ROWS], _rates(bytes_per_s=1e7), 0, None),
        # 360 MB more take longer than the 2,816 tokens that they bring.
        ([WHOLE, WIDE], _rates(), 0, WHOLE),
        # The pool has nearly as much.
        ([ROWS], _rates(), 6880, None),
        # Computing is not measured yet: what leaves least to compute.
        ([WHOLE, ROWS], Rates(), 0, ROWS),
        ([], _rates(), 0, None),
        ([], Rates(), 0, None),
    ],
)
def test_the_quickest_way_is_taken(ways, rates, num_local, expected):
    assert choose_way(ways, rates, num_local, 8000, 0) is expected


def test_what_is_read_before_counts_for_the_disk_alone():
    near = _way(7680, 50_000_000, 6912, is_host=True)
    queue = 10_000_000_000
    assert choose_way([ROWS], _rates(), 0, 8000, queue) is None
    assert choose_way([near], _rates(), 0, 8000, queue) is near
    assert choose_way([ROWS], _rates(), 0, 8000, queue, always=True) is ROWS


def test_rows_alone_are_told_from_a_state():
    assert ROWS.is_rows_alone
    assert not WHOLE.is_rows_alone
