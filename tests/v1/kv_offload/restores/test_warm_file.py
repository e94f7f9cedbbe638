"""What a next start brings back is read as it was written; damage costs its entry alone."""

import json
import math

import pytest

from tests.distributed.kv_transfer.test_used_prefixes import chain
from vllm.distributed.kv_transfer.used_prefixes import WarmPrefix
from vllm.v1.kv_offload.restores.warm_file import dump_prefixes, load_prefixes


@pytest.mark.parametrize(("later", "left"), [(10.0, 50.0), (-1000.0, 60.0), (61.0, None)])
def test_a_time_to_live_goes_on_over_a_restart_whatever_the_clock_does(later, left) -> None:
    data = dump_prefixes([WarmPrefix(chain(1, 3), 1.0, "rules", 60.0)], now=5000.0)
    found = load_prefixes(data, now=5000.0 + later)
    assert [p.seconds for p in found] == ([] if left is None else [left])


def test_what_was_written_is_read() -> None:
    prefixes = [WarmPrefix(chain(1, 3), 1.0, "ever"), WarmPrefix(chain(2, 7), 2.5)]
    first, second = load_prefixes(dump_prefixes(prefixes, 0.0), 9e9)
    assert (first.name, first.seconds, first.hashes) == ("ever", math.inf, prefixes[0].hashes)
    assert (second.name, second.weight, second.hashes) == (None, 2.5, prefixes[1].hashes)


def test_a_long_list_is_cut() -> None:
    data = dump_prefixes([WarmPrefix(chain(seed, 4096)) for seed in range(8)], 0.0)
    assert len(data) < 1 << 18
    assert 0 < len(load_prefixes(data, 0.0)) < 8


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"hashes": 3},
        {"hashes": "AAAA", "units": 2, "weight": 1},
        {"hashes": "AAAA", "units": 0, "weight": 1},
        {"hashes": "", "units": 1, "weight": 1},
        {"hashes": "AAAA", "units": "x", "weight": 1},
        {"hashes": "*", "units": 1, "weight": 1},
        {"hashes": "AAAA", "units": 1},
        {"hashes": "AAAA", "units": 1, "name": "n", "until": "soon", "seconds": 1},
    ],
)
def test_what_is_no_entry_is_left_out(entry) -> None:
    good = json.loads(dump_prefixes([WarmPrefix(chain(1, 2))], 0.0))
    assert len(load_prefixes(json.dumps([entry, *good]).encode(), 0.0)) == 1
    assert load_prefixes(json.dumps(entry).encode(), 0.0) == []
    assert load_prefixes(b"\xff{", 0.0) == []
