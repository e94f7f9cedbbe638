"""Counting tokens."""

import msgspec
import pytest

from vllm.entrypoints.openai.engine_stream import JobOutput
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.messages import PrefillStats


def _item(job: int, num_tokens: int, cached: int | None, n: int = 1) -> JobOutput:
    answers = [CompletionOutput(i, "", [7] * num_tokens) for i in range(n)]
    output = RequestOutput("r", None, None, None, answers, False, num_cached_tokens=cached)
    return JobOutput(job, output)


def test_each_prompt_counts_once() -> None:
    usage = UsageCounter([10, 20])
    for item in (_item(0, 1, None), _item(0, 2, 8, n=2), _item(1, 1, 16), _item(0, 1, 8)):
        usage.add(item)
    body = usage.usage
    assert (body.prompt_tokens, body.completion_tokens, body.total_tokens) == (30, 7, 37)
    assert body.prompt_tokens_details.cached_tokens == 24


def _prefilled(job: int, prefill: PrefillStats) -> JobOutput:
    item = _item(job, 1, prefill.num_cached_tokens)
    item.output.prefill_stats = prefill
    return item


def test_reasons_add_up_over_prompts() -> None:
    usage = UsageCounter([100, 50, 40], shows_misses=True)
    usage.add(_prefilled(0, PrefillStats(100, 64, 96, {"window_evicted": 32, "bypassed": 4})))
    usage.add(_prefilled(1, PrefillStats(50, 0, 0, {"first_seen": 32, "bypassed": 18})))
    early = usage.usage.prompt_tokens_details
    assert early.miss_tokens == {"window_evicted": 32, "first_seen": 32, "bypassed": 22}
    usage.add(_prefilled(2, PrefillStats(40, 32, 32, {"above_last_boundary": 8})))
    # Further outputs of a prompt say the same again.
    usage.add(_prefilled(2, PrefillStats(40, 32, 32, {"above_last_boundary": 8})))
    details = usage.usage.prompt_tokens_details
    assert isinstance(details.miss_tokens, dict)
    assert details.cached_tokens + sum(details.miss_tokens.values()) == 190
    assert (details.cached_tokens, details.dense_match_tokens) == (96, 128)


@pytest.mark.parametrize("shows_misses", [False, True])
def test_reasons_are_shown_on_demand(shows_misses: bool) -> None:
    usage = UsageCounter([10], shows_misses=shows_misses)
    usage.add(_prefilled(0, PrefillStats(10, 0, 0, {"above_last_boundary": 10})))
    details = msgspec.to_builtins(usage.usage)["prompt_tokens_details"]
    extra = {"dense_match_tokens": 0, "miss_tokens": {"above_last_boundary": 10}}
    assert details == {"cached_tokens": 0, **(extra if shows_misses else {})}
