"""Counting tokens."""

from vllm.entrypoints.openai.engine_stream import JobOutput
from vllm.entrypoints.openai.usage import UsageCounter
from vllm.outputs import CompletionOutput, RequestOutput


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
