import heapq
from types import SimpleNamespace

import pytest

from vllm.exceptions import UserInputError
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.request_options import RequestOptions
from vllm.v1.utils import ConstantList


def make_request(request_id="r", prompt=(1, 2, 3), **kw):
    kw.setdefault("sampling_params", SamplingParams(max_tokens=8))
    kw.setdefault("pooling_params", None)
    kw.setdefault("arrival_time", 0.0)
    return Request(request_id=request_id, prompt_token_ids=list(prompt), **kw)


class TestStatus:
    def test_order(self):
        assert [status.name for status in RequestStatus] == [
            "WAITING",
            "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
            "WAITING_FOR_REMOTE_KVS",
            "WAITING_FOR_STREAMING_REQ",
            "RUNNING",
            "PREEMPTED",
            "FINISHED_STOPPED",
            "FINISHED_LENGTH_CAPPED",
            "FINISHED_ABORTED",
            "FINISHED_IGNORED",
            "FINISHED_ERROR",
            "FINISHED_REPETITION",
        ]
        assert list(RequestStatus) == sorted(RequestStatus)

    @pytest.mark.parametrize("status", list(RequestStatus))
    def test_text_and_end(self, status):
        assert str(status) == f"{status}" == status.name
        assert RequestStatus.is_finished(status) == status.name.startswith("FINISHED")
        if RequestStatus.is_finished(status):
            assert RequestStatus.get_finished_reason(status) is not None

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            (RequestStatus.RUNNING, None),
            (RequestStatus.FINISHED_STOPPED, FinishReason.STOP),
            (RequestStatus.FINISHED_LENGTH_CAPPED, FinishReason.LENGTH),
            (RequestStatus.FINISHED_ABORTED, FinishReason.ABORT),
            (RequestStatus.FINISHED_IGNORED, FinishReason.LENGTH),
            (RequestStatus.FINISHED_ERROR, FinishReason.ERROR),
            (RequestStatus.FINISHED_REPETITION, FinishReason.REPETITION),
        ],
    )
    def test_reason(self, status, reason):
        assert RequestStatus.get_finished_reason(status) is reason


def test_initial_state():
    request = make_request(client_index=3, priority=2, cache_salt="s", trace_headers={"a": "b"})
    assert request.status is RequestStatus.WAITING
    assert not request.is_finished()
    assert request.get_finished_reason() is None
    assert request.num_computed_tokens == 0
    assert request.num_prompt_tokens == request.num_tokens == request.num_tokens_with_spec == 3
    assert request.num_output_tokens == 0
    assert request.max_tokens == 8
    assert (request.client_index, request.priority, request.cache_salt) == (3, 2, "s")
    assert request.spec_token_ids == request.mm_features == request.events == []
    assert request.block_hashes == []
    assert (request.num_preemptions, request.num_output_placeholders) == (0, 0)
    assert (request.async_tokens_to_discard, request.next_decode_eligible_step) == (0, 0)
    assert request.is_prefill_chunk is False
    assert request.stop_reason is None
    assert request.lora_request is None
    assert request.kv_transfer_params is None
    assert request.structured_output_request is None
    assert request.streaming_queue is None
    assert request.prefill_stats is None
    assert request.trace_headers == {"a": "b"}
    assert not request.has_encoder_inputs
    assert not request.use_structured_output
    assert make_request(arrival_time=None).arrival_time > 1e9


class TestTokens:
    def test_append(self):
        request = make_request()
        request.append_output_token_ids(7)
        request.append_output_token_ids([8, 9])
        assert request.output_token_ids == [7, 8, 9]
        assert request.all_token_ids == [1, 2, 3, 7, 8, 9]
        assert request.num_output_tokens == 3
        assert request.num_prompt_tokens == 3
        request.spec_token_ids = [4, 4]
        assert request.num_tokens_with_spec == 8
        assert request.num_tokens == 6

    def test_views_are_read_only(self):
        request = make_request()
        for view in (request.all_token_ids, request.output_token_ids):
            with pytest.raises(TypeError):
                view.append(1)
        assert request.all_token_ids.copy() == [1, 2, 3]

    def test_prompt_is_copied(self):
        prompt = [1, 2, 3]
        request = Request("r", prompt, SamplingParams(), None)
        request.append_output_token_ids(4)
        assert prompt == request.prompt_token_ids == [1, 2, 3]

    def test_embeds_only(self):
        request = Request("r", None, SamplingParams(), None, prompt_embeds=[[0.0]] * 4)
        assert request.all_token_ids == [0, 0, 0, 0]
        assert request.prompt_token_ids is None
        assert request.num_prompt_tokens == 4

    def test_empty_prompt(self):
        assert make_request(prompt=()).num_prompt_tokens == 0

    def test_no_prompt(self):
        with pytest.raises(UserInputError, match="prompt_token_ids or prompt_embeds"):
            Request("r", None, SamplingParams(), None)


class TestBlockHashes:
    HASHER = staticmethod(get_request_block_hasher(2, sha256))

    def test_same_list_grows(self):
        request = make_request(block_hasher=self.HASHER)
        hashes = request.block_hashes
        assert len(hashes) == 1
        request.append_output_token_ids(4)
        assert len(hashes) == 2
        request.append_output_token_ids([5, 6, 7])
        assert len(hashes) == 3
        assert request.block_hashes is hashes
        whole = make_request(prompt=range(1, 8), block_hasher=self.HASHER)
        assert whole.block_hashes == hashes

    def test_replaced_tokens_are_hashed_anew(self):
        request = make_request(block_hasher=self.HASHER)
        request.prompt_token_ids = [9] * 6
        request._all_token_ids = list(request.prompt_token_ids)
        request.all_token_ids = ConstantList(request._all_token_ids)
        request.block_hashes = []
        request.update_block_hashes()
        assert (
            request.block_hashes
            == make_request(prompt=[9] * 6, block_hasher=self.HASHER).block_hashes
        )

    def test_lora_and_salt_enter(self):
        requests = [
            make_request(block_hasher=self.HASHER),
            make_request(block_hasher=self.HASHER, cache_salt="s"),
            make_request(block_hasher=self.HASHER, lora_request=LoRARequest("l", 1, "/p")),
        ]
        assert len({request.block_hashes[0] for request in requests}) == 3


class TestParams:
    def test_neither(self):
        with pytest.raises(UserInputError, match="neither"):
            Request("r", [1], None, None)

    def test_pooling(self):
        request = Request("r", [1], None, SimpleNamespace(skip_reading_prefix_cache=True))
        assert request.max_tokens == 1
        assert request.skip_reading_prefix_cache

    def test_max_tokens_must_be_resolved(self):
        with pytest.raises(UserInputError, match="max_tokens"):
            make_request(sampling_params=SamplingParams(max_tokens=None))

    @pytest.mark.parametrize(
        ("kw", "expected"),
        [
            ({}, False),
            ({"prompt_logprobs": 0}, True),
            ({"skip_reading_prefix_cache": True}, True),
            ({"skip_reading_prefix_cache": False, "prompt_logprobs": 1}, True),
        ],
    )
    def test_skip_reading_prefix_cache(self, kw, expected):
        request = make_request(sampling_params=SamplingParams(**kw))
        assert request.skip_reading_prefix_cache is expected

    def test_kv_transfer_params(self):
        params = SamplingParams(extra_args={"kv_transfer_params": {"a": 1}})
        request = make_request(sampling_params=params)
        assert request.kv_transfer_params == {"a": 1}
        request.kv_transfer_params = None

    def test_structured_output(self):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        request = make_request(sampling_params=params, reasoning_ended=False)
        assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        assert request.use_structured_output
        assert request.structured_output_request.params.regex == "a+"
        assert request.structured_output_request.reasoning_ended is False

    def test_resumable(self):
        assert list(make_request(resumable=True).streaming_queue) == []


class TestProgress:
    def test_chunks(self):
        request = make_request(prompt=range(10))
        request.start_running(4)
        assert request.status is RequestStatus.RUNNING
        request.advance(3)
        assert request.num_computed_tokens == 7
        assert request.is_prefill_chunk
        request.advance(3)
        assert not request.is_prefill_chunk

    def test_placeholders_count_as_tokens_to_come(self):
        request = make_request(prompt=range(4))
        request.num_output_placeholders = 2
        request.advance(5)
        assert request.is_prefill_chunk
        request.advance(1)
        assert not request.is_prefill_chunk

    def test_rejected_drafts(self):
        request = make_request(prompt=range(4))
        request.advance(4)
        request.reject_drafts(2)
        assert (request.num_computed_tokens, request.num_output_placeholders) == (2, 0)
        request.num_output_placeholders = 3
        request.reject_drafts(1)
        assert (request.num_computed_tokens, request.num_output_placeholders) == (1, 2)

    def test_rejection_after_preemption(self):
        request = make_request(prompt=range(4))
        request.advance(4)
        request.preempt()
        request.reject_drafts(2)
        assert request.num_computed_tokens == 0

    def test_preempt(self):
        request = make_request()
        request.start_running(0)
        request.advance(2)
        request.spec_token_ids = [1]
        request.append_output_token_ids(5)
        request.preempt()
        assert request.status is RequestStatus.PREEMPTED
        assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
        assert request.spec_token_ids == []
        assert not request.is_prefill_chunk
        assert request.output_token_ids == [5]
        assert not request.is_finished()

    def test_finish(self):
        request = make_request()
        request.finish(RequestStatus.FINISHED_STOPPED, stop_reason=42)
        assert request.is_finished()
        assert request.stop_reason == 42
        assert request.get_finished_reason() is FinishReason.STOP
        with pytest.raises(AssertionError, match="RUNNING is not an end"):
            make_request().finish(RequestStatus.RUNNING)


def test_events_drain():
    request = make_request()
    assert request.take_events() is None
    request.record_event(EngineCoreEventType.QUEUED, 1.5)
    request.record_event(EngineCoreEventType.SCHEDULED)
    first, second = request.take_events()
    assert (first.type, first.timestamp) == (EngineCoreEventType.QUEUED, 1.5)
    assert second.timestamp > 0
    assert request.take_events() is None
    assert request.events == []


def test_prefill_stats_are_committed_once():
    request = make_request()
    assert request.take_prefill_stats() is None
    stats = PrefillStats(3, 2, miss_tokens={"first seen": 1})
    request.record_prefill_stats(stats)
    assert request.take_prefill_stats() is stats
    assert request.take_prefill_stats() is None
    request.preempt()
    request.record_prefill_stats(PrefillStats(3, 3))
    assert request.take_prefill_stats() is None


def test_encoder_inputs():
    mm = [
        MultiModalFeatureSpec(None, "image", "a", PlaceholderRange(0, 5)),
        MultiModalFeatureSpec(None, "image", "b", PlaceholderRange(6, 2)),
    ]
    request = make_request(prompt=range(9), mm_features=mm)
    assert request.has_encoder_inputs
    assert [request.get_num_encoder_embeds(i) for i in range(2)] == [5, 2]


def test_order():
    late = make_request("a", arrival_time=2.0)
    early = make_request("b", arrival_time=1.0)
    urgent = make_request("c", priority=-1, arrival_time=3.0)
    twin = make_request("aa", arrival_time=2.0)
    heap = [late, early, urgent, twin]
    heapq.heapify(heap)
    assert [heapq.heappop(heap).request_id for _ in range(4)] == ["c", "b", "a", "aa"]
    assert (late < late) is False


def test_identity():
    one, two = make_request(), make_request()
    assert one != two
    assert len({one, two}) == 2
    assert (one < two) != (two < one)
    assert "request_id='r', status=WAITING" in repr(one)


def test_from_message():
    message = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=3),
        arrival_time=5.0,
        client_index=1,
        options=RequestOptions(priority=4, cache_salt="salt", trace_headers={"t": "1"}),
    )
    request = Request.from_engine_core_request(message, get_request_block_hasher(2, sha256))
    for name in ("request_id", "prompt_token_ids", "arrival_time", "client_index", "options"):
        assert getattr(request, name) == getattr(message, name)
    for name in ("priority", "cache_salt", "trace_headers"):
        assert getattr(request, name) == getattr(message.options, name)
    assert request.max_tokens == 3
    assert len(request.block_hashes) == 1


class TestTextOwner:
    def test_tenants_and_salts_own_their_texts(self):
        owners = [
            make_request(tenant=tenant, cache_salt=salt).text_owner
            for tenant in (None, "a", "b")
            for salt in (None, "a", "b")
        ]
        assert None not in owners
        assert len(set(owners)) == len(owners)
        again = make_request(request_id="again", prompt=(4, 5), tenant="a", cache_salt="b")
        assert again.text_owner == owners[5]

    @pytest.mark.parametrize("options", [{"skip_cache_insert": True}, {"cache_insert_end": 2}])
    def test_what_others_may_not_find_is_nobodys(self, options):
        assert make_request(options=RequestOptions(**options)).text_owner is None

    def test_workers_are_told(self):
        data = NewRequestData.from_request(make_request(cache_salt="a"), ([1],))
        assert data.text_owner == make_request(cache_salt="a").text_owner
