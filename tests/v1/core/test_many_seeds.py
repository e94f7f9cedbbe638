"""The random traffic of many seeds: a few of them, and that they are about what they should be."""

import json

import pytest

from tests.v1.core.many_seeds import Traffic, main, run_random_traffic
from tests.v1.core.unit_cache_driver import RowMemory


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 24, 54, 78])
def test_no_wrong_read_under_pressure(first: int) -> None:
    """Multi-turn, fan-out and edited prompts in a pool where everything is evicted all the time."""
    for seed in range(first, first + 6):
        run_random_traffic(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "geometry", ["v4.1", "v4.1-short", "gemma", "gpt-oss", "llama", "mistral", "qwen3.5", "glm"]
)
def test_full_attention_and_windows_under_pressure(geometry: str) -> None:
    drivers = [run_random_traffic(seed, Traffic.of_seed(seed, geometry)) for seed in (0, 1, 5)]
    assert any(hit > 0 for driver in drivers for hit in driver.hits.values())
    # Full attention alone is admitted only where it fits to its prompt's end.
    assert geometry == "llama" or sum(driver.num_preemptions for driver in drivers) > 0


@pytest.mark.slow
def test_random_traffic_really_hits_evicts_preempts_and_pins() -> None:
    drivers = [run_random_traffic(seed) for seed in (24, 75)]
    assert all(d.peak_pins > 0 for d in drivers)
    assert [d.is_priority for d in drivers] == [False, True]
    assert sum(d.num_preemptions for d in drivers) > 0
    assert any(hit > 0 for d in drivers for hit in d.hits.values())
    assert any(len(d.manager.block_pool.index.ghosts) > 0 for d in drivers)


def test_seeds_cover_every_combination() -> None:
    seen = {Traffic.of_seed(seed) for seed in range(96)}
    combinations = {(t.unit, t.is_priority, t.policy, t.pinning) for t in seen}
    assert len(combinations) == 3 * 2 * 4 * 3


@pytest.mark.slow
def test_a_wrong_row_is_noticed() -> None:
    memory: RowMemory = run_random_traffic(1).memory
    block_id, (group, rows) = next(iter(memory._blocks.items()))
    row, tag = next(iter(rows.items()))
    memory._read(group, block_id, row, [tag], "right")
    with pytest.raises(AssertionError, match="another prefix's"):
        memory._read(group, block_id, row, [tag + 1], "wrong")


@pytest.mark.slow
def test_main_prints_totals(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seeds", "1", "--first", "5"])
    totals = json.loads(capsys.readouterr().out)
    assert totals["seeds"] == 1
    assert totals["rows_read"] > 1000
    assert totals["wrong_reads"] == 0
