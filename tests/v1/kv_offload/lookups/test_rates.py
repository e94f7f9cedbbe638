"""What was measured: kept over a restart, and what it says of restoring."""

import json

import pytest

from vllm.v1.kv_offload.lookups.rates import Rates


def test_rates_are_kept() -> None:
    rates = Rates()
    rates.note_restore(10 << 20, 0.013)
    rates.note_restore(10 << 20, 0.004, is_host=True)
    rates.note_step(5000, 512, 0.1)
    rates.note_step(5000, 1, 0.02)
    again = Rates.from_json(rates.to_json())
    assert again == rates
    assert again.bytes_per_s != Rates().bytes_per_s
    assert again.host_bytes_per_s != Rates().host_bytes_per_s
    assert again.step_s == 0.02


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
        '{"step_s": -1}',
        '{"step_s": NaN}',
        '{"step_s": "slow"}',
    ],
)
def test_what_is_no_rate_is_left_out(text) -> None:
    assert Rates.from_json(text) == Rates()


def test_host_memory_pays_where_the_disk_does_not() -> None:
    rates = Rates(bytes_per_s=1e6, host_bytes_per_s=4e9, tokens_per_s={0: 10_000.0})
    computing = rates.compute_s(0, 1000)
    assert rates.cost_s(10 << 20, 1000, 1000) > computing
    assert rates.cost_s(0, 1000, 1000, num_host=10 << 20) < computing
    # What waits before it counts; it does not for host memory.
    assert rates.cost_s(1, 1000, 1000, num_queued=10 << 20) > computing


def test_a_step_that_runs_anyway_is_no_gain_of_a_load() -> None:
    """Steps take 10 ms and 0.1 ms more a token: a load of 40 tokens would save 4 ms, not 14."""
    rates = Rates(bytes_per_s=1e9)
    for _ in range(60):
        rates.note_step(300, 1, 0.010)
        rates.note_step(300, 40, 0.014)
        rates.note_step(300, 1000, 0.110)
    assert rates.step_s == pytest.approx(0.010)
    assert rates.compute_s(300, 340) == pytest.approx(0.004, rel=0.01)
    # Half a megabyte is read in 0.5 ms, but waits for a step and for the disk's thread.
    assert rates.cost_s(500_000, 340, 340) > rates.compute_s(300, 340)
    assert rates.cost_s(500_000, 1300, 1300) < rates.compute_s(300, 1300)


def test_a_step_is_not_all_overhead() -> None:
    """Decode steps may have been slow for another reason: what tokens took is never nothing."""
    rates = Rates()
    rates.note_step(0, 2, 1.0)
    rates.note_step(0, 100, 0.5)
    assert rates.compute_s(0, 100) == pytest.approx(0.125)


def test_steps_of_some_tokens_tell_nothing() -> None:
    rates = Rates()
    rates.note_step(0, 5, 1.0)
    rates.note_step(0, 31, 1.0)
    rates.note_step(0, 32, 0.0)
    assert rates == Rates()
