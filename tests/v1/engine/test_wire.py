import msgspec
import pytest

from vllm.exceptions import (
    CheckpointError,
    ConfigError,
    EngineError,
    QueueFullError,
    UnsupportedFeatureError,
    UserInputError,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
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
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    Ask,
    Codec,
    Dead,
    ErrorInfo,
    GroupInfo,
    Heartbeat,
    KVCacheInfo,
    Ready,
    RequestRejected,
    Shutdown,
    StartFailed,
    StepOutputs,
    WithdrawPrefixes,
)
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats
from vllm.v1.request_options import RequestOptions

INFO = KVCacheInfo(
    num_blocks=9,
    capacity_tokens=128,
    capacity_bytes=4096,
    max_concurrency=1.5,
    max_model_len=64,
    block_size=32,
    unit=32,
    smallest_reusable_prefix=None,
    retention="all",
    groups=(GroupInfo("mla", 128, 2, 64), GroupInfo("window", 32, 1, 64, 128)),
)
PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    seed=-7,
    stop=["a", "b"],
    stop_token_ids=[1],
    max_tokens=None,
    logprobs=3,
    output_kind=RequestOutputKind.DELTA,
    extra_args={"kv_transfer_params": {"x": [1]}},
)
OPTIONS = RequestOptions(priority=-1, cache_salt="s", prompt_cache_key="k")
TO_CORE = [
    AddRequests([EngineCoreRequest("r", [1, 2], PARAMS, 1.5, options=OPTIONS)]),
    AbortRequests(["a"]),
    WithdrawPrefixes(["a", "b"]),
    Ask(3, "ResetCache", b"\x80"),
    Shutdown(),
]
FROM_CORE = [
    Ready(12, INFO, 0.5, 1.0),
    StartFailed(ErrorInfo("ConfigError", "no")),
    StepOutputs(
        EngineCoreOutputs(
            [
                EngineCoreOutput(
                    "r",
                    [5],
                    LogprobsRows([[5, 6]], [[-0.5, -1.0]], [1]),
                    finish_reason=FinishReason.STOP,
                    stop_reason="end",
                    events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 2.0)],
                    prefill_stats=PrefillStats(4, 2, 3, {"evicted": 2}),
                )
            ],
            SchedulerStats(
                1, 2, 3, 0.5, PrefixCacheStats(queries=4), None, SpecDecodingStats.new(2)
            ),
            timestamp=3.0,
        )
    ),
    RequestRejected("r", ErrorInfo("UserInputError", "bad", "n")),
    Answer(3, b"\xc2"),
    Answer(3, error=ErrorInfo("EngineError", "no")),
    Heartbeat(5, True),
    Dead("gone"),
]


@pytest.mark.parametrize("message", TO_CORE, ids=lambda m: type(m).__name__)
def test_messages_to_the_core_survive_the_wire(message):
    assert Codec().decode_to_core(Codec().encode(message)) == message


@pytest.mark.parametrize("message", FROM_CORE, ids=lambda m: type(m).__name__)
def test_messages_from_the_core_survive_the_wire(message):
    assert Codec().decode_from_core(Codec().encode(message)) == message


def test_greedy_parameters_stay_greedy_on_the_wire():
    sent = AddRequests([EngineCoreRequest("r", [1], SamplingParams(temperature=0.0), 0.0)])
    received = Codec().decode_to_core(Codec().encode(sent))
    assert isinstance(received, AddRequests)
    assert received.requests[0].sampling_params.is_greedy


def test_what_is_no_message_is_refused():
    for data in (b"\x01", msgspec.msgpack.encode({"type": "nonsense"})):
        with pytest.raises(msgspec.ValidationError):
            Codec().decode_to_core(data)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("bad flag"),
        CheckpointError("missing tensor"),
        UserInputError("wrong", "n"),
        UnsupportedFeatureError("later", "tools"),
        QueueFullError("full"),
    ],
)
def test_errors_keep_their_type_and_message(error):
    rebuilt = ErrorInfo.from_exception(error).to_exception()
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert getattr(rebuilt, "param", None) == getattr(error, "param", None)


def test_foreign_errors_become_engine_errors_that_name_them():
    rebuilt = ErrorInfo.from_exception(KeyError("x")).to_exception()
    assert type(rebuilt) is EngineError
    assert str(rebuilt) == "KeyError: 'x'"
