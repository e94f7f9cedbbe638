"""What answers tell of their times."""

import msgspec
import pytest

from vllm.entrypoints.openai.answer_metrics import answer_metrics
from vllm.v1.metrics.iteration_stats import RequestStateStats


def test_the_stages_of_an_answer() -> None:
    stats = RequestStateStats(
        arrival_time=9.5,
        queued_ts=10.0,
        scheduled_ts=10.25,
        first_token_ts=11.0,
        last_token_ts=13.0,
        num_generation_tokens=5,
        num_preemptions=1,
        first_token_latency=1.5,
    )
    assert msgspec.to_builtins(answer_metrics(stats)) == {
        "num_generation_tokens": 5,
        "num_preemptions": 1,
        "queue_time_ms": 250.0,
        "prefill_time_ms": 750.0,
        "time_to_first_token_ms": 1500.0,
        "decode_time_ms": 2000.0,
        "mean_itl_ms": 500.0,
    }


@pytest.mark.parametrize(("num_tokens", "last"), [(0, 0.0), (1, 11.0)])
def test_stages_that_were_not_reached_are_left_out(num_tokens: int, last: float) -> None:
    stats = RequestStateStats(
        queued_ts=10.0, first_token_ts=last, last_token_ts=last, num_generation_tokens=num_tokens
    )
    told = msgspec.to_builtins(answer_metrics(stats))
    times = {"decode_time_ms": 0.0} if num_tokens else {}
    assert told == {"num_generation_tokens": num_tokens, "num_preemptions": 0, **times}


def test_nothing_is_told_of_what_was_not_measured() -> None:
    assert answer_metrics(None) is msgspec.UNSET
