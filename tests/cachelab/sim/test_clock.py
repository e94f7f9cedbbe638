"""A load under the simulated clock: times follow from steps, hits from the real cache."""

import pytest

from tests.cachelab.twin.recorded_run import small_settings
from vllm.benchmarks.datasets.synthetic import Reading, RepeatShape
from vllm.cachelab.sim.clock import ClockedRun, SimResult
from vllm.cachelab.sim.cost import CostModel
from vllm.cachelab.sim.engine import Acceptance, SimEngine
from vllm.cachelab.sim.loads import repeat_load
from vllm.cachelab.sim.requests import PrefixUnits, SimRequest

COST = CostModel(per_step=1.0, per_prefill_token=0.0)
WIDE = {"max_num_batched_tokens": 512, "max_num_seqs": 12}


def _request(name: str, ids: tuple[int, ...], arrival: float = 0.0, out: int = 3) -> SimRequest:
    return SimRequest(
        name, 32 * len(ids) + 1, out, PrefixUnits(int(name), (*ids, 999), 32, 32), arrival
    )


def _run(requests: list[SimRequest], limit: int | None = None, **settings: object) -> SimResult:
    engine = SimEngine(small_settings(num_blocks=900, **settings))
    return ClockedRun(engine, COST, limit).run(requests)


def test_times_are_counted_in_steps() -> None:
    result = _run([_request("0", (1, 2), 5.0), _request("1", (3, 4), 6.0)])
    first, second = result.seen
    # A step each: the prompt, then two tokens; the second comes in while the first runs.
    assert (first.start_s, first.chunk_s, first.latency_s) == (5.0, [1.0, 2.0, 3.0], 3.0)
    assert (second.start_s, second.ttft_s) == (6.0, 1.0)
    assert (result.num_steps, result.duration_s) == (4, 9.0)


def test_a_chunked_prompt_takes_its_steps() -> None:
    ids = tuple(range(1, 41))
    result = _run([_request("0", ids, out=1)])
    assert result.seen[0].ttft_s == 3.0


def test_a_resend_hits_and_unrelated_prompts_do_not() -> None:
    ids = tuple(range(1, 9))
    result = _run([_request("0", ids), _request("1", ids, 50.0), _request("2", (77,), 60.0)])
    assert [o.usage.cached_tokens for o in result.seen] == [0, 256, 0]
    assert all(
        sum((o.usage.miss_tokens or {}).values()) + (o.usage.cached_tokens or 0)
        == o.num_prompt_tokens
        for o in result.seen
    )


def test_clients_wait_for_their_turn() -> None:
    load = [_request(str(i), (i + 1,), out=1) for i in range(3)]
    result = _run(load, 1)
    assert [o.start_s for o in result.seen] == [0.0, 1.0, 2.0]
    assert [o.queue_s for o in result.seen] == [0.0, 1.0, 2.0]


def test_drafts_that_stand_save_steps() -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 1}
    engine = SimEngine(small_settings(num_blocks=900, speculative=mtp), Acceptance(1.0))
    result = ClockedRun(engine, COST).run([_request("0", (1,), out=9)])
    assert result.num_steps == 5
    assert result.seen[0].num_output_tokens == 9


@pytest.mark.slow
@pytest.mark.parametrize("reading", list(Reading))
def test_every_reading_hits_what_its_shape_says(reading: Reading) -> None:
    shape = RepeatShape(reading, input_len=640, output_len=2, share=0.9, rate=0.9, pool=4)
    engine = SimEngine(small_settings(num_blocks=3000))
    result = ClockedRun(engine, COST, 1).run(repeat_load(shape, 40, engine.hash_unit, 0))
    rate = sum(o.usage.cached_tokens or 0 for o in result.seen) / (40 * 640)
    # 18 of 20 spans come back in 39, in 36 of 40; of the third kind about nine in ten, whole.
    expected = {Reading.BEGINNING: 0.878, Reading.ROUNDS: 0.81, Reading.WHOLE: 0.855}[reading]
    assert rate == pytest.approx(expected, abs=0.08)
