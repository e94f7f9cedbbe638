"""What was measured: kept over a restart, and what it says of restoring."""

import json

import pytest

from vllm.v1.kv_offload.rates import Rates


def test_rates_are_kept() -> None:
    rates = Rates()
    rates.note_restore(10 << 20, 0.013)
    rates.note_restore(10 << 20, 0.004, is_host=True)
    rates.note_prefill(5000, 512, 0.1)
    again = Rates.from_json(rates.to_json())
    assert again == rates
    assert again.bytes_per_s != Rates().bytes_per_s
    assert again.host_bytes_per_s != Rates().host_bytes_per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"bytes_per_s": "fast"}',
        '{"bytes_per_s": -1, "tokens_per_s": []}',
        '{"bytes_per_s": NaN, "host_bytes_per_s": Infinity}',
        json.dumps({"tokens_per_s": {"x": 1.0, "999999999": 5.0, "3": 0, "-1": 7.0}}),
    ],
)
def test_what_is_no_rate_is_left_out(text) -> None:
    assert Rates.from_json(text) == Rates()


def test_host_memory_pays_where_the_disk_does_not() -> None:
    rates = Rates(bytes_per_s=1e6, host_bytes_per_s=4e9, tokens_per_s={0: 10_000.0})
    assert not rates.pays(10 << 20, 0, 1000)
    assert rates.pays(0, 0, 1000, num_host=10 << 20)
    # What waits before it counts; it does not for host memory.
    assert not rates.pays(1, 0, 1000, num_queued=10 << 20)
