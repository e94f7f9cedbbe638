import time

import pytest

from tests.v1.engine.fakes import make_tokenizer
from vllm.exceptions import UserInputError
from vllm.sampling_params import (
    ReasoningSpan,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsRows,
    PrefillStats,
)
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.iteration_stats import IterationStats
from vllm.v1.request_options import RequestOptions

TOKENIZER = make_tokenizer()
ABC = [TOKENIZER.encode(c)[0] for c in "abcdefgh"]


class Sink:
    def __init__(self) -> None:
        self.outputs = []
        self.error = None

    def put(self, output) -> None:
        self.outputs.append(output)

    def fail(self, error) -> None:
        self.error = error


def add(processor, request_id="r", sink=None, kind=RequestOutputKind.DELTA, **params):
    request = EngineCoreRequest(
        request_id, [1, 2, 3], SamplingParams(output_kind=kind, **params), time.monotonic()
    )
    return [child.request_id for child in processor.add_request(request, "abc", sink)]


def test_every_answer_carries_the_whole_request():
    request = EngineCoreRequest(
        "r",
        [1, 2, 3],
        SamplingParams(n=2, seed=7),
        1.0,
        options=RequestOptions(priority=3, cache_salt="s"),
    )
    first, second = OutputProcessor(TOKENIZER).add_request(request, "abc", None)
    assert (first.is_extra_answer, second.is_extra_answer) == (False, True)
    for child in (first, second):
        assert child.options == request.options


def step(processor, *outputs, stats=None):
    return processor.process_outputs(EngineCoreOutputs(list(outputs)), stats)


def test_several_tokens_of_a_step_end_at_the_stop_string():
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, stop=["bc"], logprobs=0)
    rows = LogprobsRows([[t] for t in ABC[:5]], [[-1.0]] * 5, [1] * 5)
    result = step(processor, EngineCoreOutput(core_id, ABC[:5], new_logprobs=rows))
    (output,) = result.outputs
    (answer,) = output.outputs
    assert (answer.text, list(answer.token_ids)) == ("a", ABC[:3])
    assert len(answer.logprobs) == 3
    assert answer.cumulative_logprob == -3.0
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "bc")
    assert result.aborts == [core_id]
    assert not processor.has_unfinished()
    # The core's last output for it comes late and changes nothing.
    assert step(processor, EngineCoreOutput(core_id, ABC[:1])).outputs == []


def test_a_stop_string_in_the_last_token_wins_and_needs_no_abort():
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, stop=["b"])
    output = EngineCoreOutput(core_id, ABC[:2], finish_reason=FinishReason.LENGTH)
    result = step(processor, output)
    assert result.outputs[0].outputs[0].finish_reason == "stop"
    assert result.aborts == []


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_the_text_of_a_stop_token_is_left_out_unless_asked(include, text):
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, stop_token_ids=[ABC[1]], include_stop_str_in_output=include)
    output = EngineCoreOutput(core_id, ABC[:2], finish_reason=FinishReason.STOP, stop_reason=ABC[1])
    (answer,) = step(processor, output).outputs[0].outputs
    assert (answer.text, list(answer.token_ids)) == (text, ABC[:2])
    assert answer.stop_reason == ABC[1]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.DELTA, ["a", "bc", "d"]),
        (RequestOutputKind.CUMULATIVE, ["a", "abc", "abcd"]),
        (RequestOutputKind.FINAL_ONLY, ["abcd"]),
    ],
)
def test_output_kinds(kind, texts):
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, kind=kind, logprobs=0)
    outputs = []
    for ids, reason in ((ABC[:1], None), (ABC[1:3], None), (ABC[3:4], FinishReason.LENGTH)):
        rows = LogprobsRows([[t] for t in ids], [[-1.0]] * len(ids), [1] * len(ids))
        output = EngineCoreOutput(core_id, ids, new_logprobs=rows, finish_reason=reason)
        outputs += step(processor, output).outputs
    assert [o.outputs[0].text for o in outputs] == texts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [len(t) for t in texts]
    assert [len(o.outputs[0].logprobs) for o in outputs] == [len(t) for t in texts]
    assert [o.finished for o in outputs] == [False] * (len(texts) - 1) + [True]


def test_a_chunk_without_tokens_says_nothing_but_is_remembered():
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, prompt_logprobs=0)
    rows = LogprobsRows([[2]], [[-1.0]], [1])
    stats = PrefillStats(3, 1, miss_tokens={"first_seen": 2})
    chunk = EngineCoreOutput(core_id, [], new_prompt_logprobs=rows, prefill_stats=stats)
    assert step(processor, chunk).outputs == []
    last = EngineCoreOutput(
        core_id, ABC[:1], new_prompt_logprobs=rows, finish_reason=FinishReason.LENGTH
    )
    (output,) = step(processor, last).outputs
    assert len(output.prompt_logprobs) == 3
    assert (output.num_cached_tokens, output.num_cache_creation_tokens) == (1, 2)
    assert output.prefill_stats is stats


def test_a_request_that_ends_without_a_token_still_ends():
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor)
    error = EngineCoreOutput(core_id, [], finish_reason=FinishReason.ERROR, stop_reason="no room")
    (output,) = step(processor, error).outputs
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("error", "no room")


def test_the_first_of_many_answers_comes_first_and_counts_the_prompt():
    processor = OutputProcessor(TOKENIZER)
    params = SamplingParams(n=20, temperature=1.0)
    request = EngineCoreRequest("r", [1, 2, 3], params, time.monotonic())
    children = processor.add_request(request, None, None)
    ids = [child.request_id for child in children]
    assert ids == sorted(ids)
    assert [child.is_extra_answer for child in children] == [False] + [True] * 19
    stats = IterationStats()
    outputs = [
        EngineCoreOutput(i, ABC[:1], prefill_stats=PrefillStats(3, 2 * (k > 0), 0, {}))
        for k, i in enumerate(ids)
    ]
    processor.process_outputs(EngineCoreOutputs(outputs), stats)
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (3, 0)
    assert stats.num_generation_tokens == 20


def test_the_counts_of_a_request():
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(processor, max_tokens=9)
    now = time.monotonic()
    events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, now),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, now + 1),
    ]
    prefill = PrefillStats(3, 2, miss_tokens={"evicted": 1})
    first, last = IterationStats(), IterationStats()
    processor.process_outputs(
        EngineCoreOutputs(
            [EngineCoreOutput(core_id, ABC[:1], events=events, prefill_stats=prefill)],
            timestamp=now + 3,
        ),
        first,
    )
    processor.process_outputs(
        EngineCoreOutputs(
            [EngineCoreOutput(core_id, ABC[:2], finish_reason=FinishReason.LENGTH)],
            timestamp=now + 4,
        ),
        last,
    )
    assert (first.num_prompt_tokens, first.num_cached_prompt_tokens) == (3, 2)
    assert len(first.time_to_first_tokens_iter) == 1
    assert last.inter_token_latencies_iter == [pytest.approx(1)]
    (finished,) = last.finished_requests
    assert (finished.num_generation_tokens, finished.num_cached_tokens) == (3, 2)
    assert finished.max_tokens == 9
    assert finished.queued_time == pytest.approx(1)
    assert finished.prefill_time == pytest.approx(2)
    assert finished.decode_time == pytest.approx(1)
    assert finished.inference_time == pytest.approx(3)
    assert finished.mean_time_per_output_token == pytest.approx(0.5)


def test_an_abort_counts_and_hands_out_what_there_is():
    processor = OutputProcessor(TOKENIZER)
    sink = Sink()
    (core_id,) = add(processor, sink=sink, stop=["xyz"])
    step(processor, EngineCoreOutput(core_id, ABC[:3]))
    stats = IterationStats()
    result = processor.abort_requests(["r", "unknown"], stats)
    assert result.aborts == [core_id]
    assert "".join(o.outputs[0].text for o in sink.outputs) == "abc"
    assert sink.outputs[-1].outputs[0].finish_reason == "abort"
    assert [f.finish_reason for f in stats.finished_requests] == [FinishReason.ABORT]
    assert processor.abort_requests(["r"], stats).aborts == []


def test_an_abort_of_n_answers_ends_them_all():
    processor = OutputProcessor(TOKENIZER)
    sink = Sink()
    ids = add(processor, sink=sink, n=3)
    step(processor, EngineCoreOutput(ids[1], ABC[:1], finish_reason=FinishReason.LENGTH))
    assert processor.abort_requests(["r"], None).aborts == [ids[0], ids[2]]
    assert sink.outputs[-1].finished
    assert not processor.has_unfinished()


def test_a_refusal_reaches_the_caller_once_for_all_answers():
    processor = OutputProcessor(TOKENIZER)
    sink = Sink()
    ids = add(processor, sink=sink, n=3)
    others = add(processor, request_id="r")
    error = UserInputError("too big")
    assert processor.reject(ids[1], error) == [ids[0], ids[2]]
    assert sink.error is error
    assert processor.reject(ids[0], error) == []
    assert processor.unfinished_ids() == ["r"]
    with pytest.raises(UserInputError):
        processor.reject(others[0], error)


def test_ids_of_the_core_are_unique():
    processor = OutputProcessor(None)
    ids = [*add(processor), *add(processor), *add(processor, n=2)]
    assert len(set(ids)) == 4 == processor.num_unfinished
    processor.abort_answers(ids[:1], None)
    assert processor.num_unfinished == 3


def test_without_a_tokenizer_answers_are_ids():
    processor = OutputProcessor(None)
    (core_id,) = add(processor)
    (output,) = step(processor, EngineCoreOutput(core_id, [1, 2])).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [1, 2])


_CUT = '{"a": ["x", "so on and so on'


@pytest.mark.parametrize(
    ("asked", "text", "reason", "named"),
    [
        ({"json": {}}, _CUT, FinishReason.LENGTH, "unfinished text at $.a[1]"),
        (
            {"json_object": True},
            '{"a": [1, 2, 3, 4, ',
            FinishReason.LENGTH,
            "unfinished list at $.a",
        ),
        ({"json": {}}, '{"a": 1}', FinishReason.LENGTH, None),
        ({"json": {}}, _CUT, FinishReason.ABORT, None),
        ({"json": {}}, _CUT, FinishReason.REPETITION, "repetition_detected"),
        ({"regex": "x"}, _CUT, FinishReason.LENGTH, None),
        (None, _CUT, FinishReason.LENGTH, None),
    ],
)
def test_json_that_a_limit_cuts_off_says_what_went_on(asked, text, reason, named, caplog):
    processor = OutputProcessor(TOKENIZER)
    structured = None if asked is None else StructuredOutputsParams(**asked)
    (core_id,) = add(processor, structured_outputs=structured)
    told = "repetition_detected" if reason is FinishReason.REPETITION else None
    stats = IterationStats()
    for begin, end in ((0, 9), (9, None)):
        ids = TOKENIZER.encode(text)[begin:end]
        output = EngineCoreOutput(core_id, ids)
        if end is None:
            output = EngineCoreOutput(core_id, ids, finish_reason=reason, stop_reason=told)
        result = step(processor, output, stats=stats)
    assert result.outputs[0].outputs[0].stop_reason == named
    (finished,) = stats.finished_requests
    is_cut = asked not in (None, {"regex": "x"}) and reason is not FinishReason.ABORT
    is_open = is_cut and text[-1] != "}"
    assert (finished.open_part is not None) is is_open
    assert [
        f"has no end within {len(TOKENIZER.encode(text))} tokens" in m for m in caplog.messages
    ] == ([True] * is_open)


@pytest.mark.parametrize(
    ("thought", "named"), [("a", "unfinished nothing"), ("ab{h", "unfinished text at $.a[1]")]
)
def test_thoughts_before_json_are_none(thought, named):
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(
        processor,
        structured_outputs=StructuredOutputsParams(json={}),
        reasoning=ReasoningSpan([ABC[7]]),
    )
    ids = TOKENIZER.encode(thought + _CUT)
    if named == "unfinished nothing":
        ids = TOKENIZER.encode("ab{")
    result = step(processor, EngineCoreOutput(core_id, ids, finish_reason=FinishReason.LENGTH))
    assert result.outputs[0].outputs[0].stop_reason == named


@pytest.mark.parametrize("asked", [{"regex": ".*"}, {"choice": ["ab", "b"]}])
def test_a_thought_before_what_is_no_json_is_not_told_as_a_part(asked):
    processor = OutputProcessor(TOKENIZER)
    (core_id,) = add(
        processor,
        structured_outputs=StructuredOutputsParams(**asked),
        reasoning=ReasoningSpan([ABC[7]]),
    )
    ids = TOKENIZER.encode("ab{")
    result = step(processor, EngineCoreOutput(core_id, ids, finish_reason=FinishReason.LENGTH))
    assert result.outputs[0].outputs[0].stop_reason is None


def test_a_call_ends_a_thought():
    processor = OutputProcessor(TOKENIZER)
    call = TOKENIZER.encode("{")
    (core_id,) = add(
        processor,
        structured_outputs=StructuredOutputsParams(json={}),
        reasoning=ReasoningSpan([ABC[7]], call_token_ids=[call]),
    )
    ids = TOKENIZER.encode("ab" + _CUT)
    result = step(processor, EngineCoreOutput(core_id, ids, finish_reason=FinishReason.LENGTH))
    assert result.outputs[0].outputs[0].stop_reason == "unfinished text at $.a[1]"
