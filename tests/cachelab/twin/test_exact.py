"""The twin hits what life hit, request by request, whatever happened to the cache."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.cachelab.twin.recorded_run import (
    SMALL_LLAMA,
    SMALL_V41,
    RecordedRun,
    small_settings,
)
from vllm.cachelab.trace.events import Begun
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.trace_file import CacheTrace, read_trace
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus

MTP = {"method": "mtp", "num_speculative_tokens": 2}
WEIGHED = {"method": "ngram", "num_speculative_tokens": 8, "weighs_drafts": True}
AHEAD = {"max_num_batched_tokens": 512, "max_num_seqs": 24, "async_scheduling": True}
CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "interval 0": {"interval": "0"},
    "interval 512": {"interval": 512},
    "none": {"interval": "none", "block_size": 64},
    "mtp": {"speculative": MTP},
    "mtp, drop": {"speculative": {**MTP, "stale_row": "drop"}},
    "mtp, keep": {"speculative": {**MTP, "stale_row": "keep"}, "interval": "0"},
    "ngram": {"speculative": {"model": "ngram", "method": "ngram", "num_speculative_tokens": 3}},
    # Most requests draft nothing, and a model without native kernels has no drafter at all.
    "weighed": {"speculative": WEIGHED},
    "weighed, none": {"speculative": WEIGHED, "hf_config": SMALL_LLAMA, "block_size": 16},
    "v4.1": {"hf_config": SMALL_V41, "num_blocks": 250},
    "v4.1, ahead": {"hf_config": SMALL_V41, "num_blocks": 250, "scheduler": AHEAD},
    "whole blocks": {"hf_config": SMALL_LLAMA, "block_size": 16, "num_blocks": 200},
    "off": {"enable_prefix_caching": False},
    "ahead": {"scheduler": AHEAD},
    "ahead, whole blocks": {"scheduler": AHEAD, "hf_config": SMALL_LLAMA, "block_size": 16},
}


def _twin(trace: CacheTrace) -> dict[str, int]:
    twin = ExactTwin(trace)
    result = twin.run()
    assert result.diverged_at is None
    return {trace.requests[n].request_id: cached for n, cached in result.cached_tokens.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_request_hits_as_it_did(case: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    run = RecordedRun(path, small_settings(**CASES[case]), seed=1)
    if case == "weighed, none":
        run.has_drafter = False
    run.run(120)
    assert run.num_preemptions or case == "off"
    assert run.num_aborts
    assert run.num_resets
    trace = read_trace(path, is_strict=True)
    assert any(isinstance(event, Begun) for event in trace.events) == ("ahead" in case)
    assert _twin(trace) == run.cached
    recorded = {r.request_id: r.cached_tokens for r in trace.requests.values()}
    assert {name: recorded[name] for name in run.cached} == run.cached
    assert bool(sum(run.cached.values())) == (case != "off")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["auto", "mtp", "whole blocks", "ahead"])
def test_requests_that_leave_nothing_leave_no_hash_and_the_twin_is_equal(
    case: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    run = RecordedRun(path, small_settings(**CASES[case]), seed=8, private_share=0.4)
    run.run(120)
    assert run.num_preemptions
    assert any(run.cached.get(request.request_id) for request in run.private)
    assert run.num_ended
    trace = read_trace(path, is_strict=True)
    assert _twin(trace) == run.cached
    names = {request.request_id for request in run.private}
    recorded = {r.added.request_id: r for r in trace.requests.values()}
    public = {h for name, r in recorded.items() if name not in names for h in r.hashes}
    assert all(recorded[name].added.skips_insert for name in names)
    own = {h[:16] for request in run.private for h in request.block_hashes} - public
    told = {h for r in recorded.values() for h in r.hashes}
    assert len(own) > 100
    assert not own & told
    raw = path.read_bytes()
    assert not any(b64encode(h)[:16] in raw for h in own)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["auto", "interval 0", "mtp", "whole blocks"])
def test_held_prefixes_are_held_as_they_were(case: str, tmp_path: Path) -> None:
    """Their times, which pass by the machine's clock in life, and by the record's in the twin."""
    path = tmp_path / "trace.jsonl"
    run = RecordedRun(path, small_settings(**CASES[case]), seed=6, holds=True)
    run.run(120)
    assert bool(run.num_forgotten) == (case != "whole blocks")
    trace = read_trace(path, is_strict=True)
    assert {ttl for r in trace.requests.values() for _, ttl in r.added.ttls} == {
        0.0,
        0.003,
        0.05,
        None,
    }
    assert _twin(trace) == run.cached


@pytest.mark.slow
def test_pins_come_with_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    monkeypatch.setenv("VLLM_PIN_MIN_DROP_SIZE", "0")
    run = RecordedRun(path, small_settings(interval="0"), seed=3)
    run.run(60)
    monkeypatch.delenv("VLLM_PIN_SWA_TOKENS")
    monkeypatch.delenv("VLLM_PIN_MIN_DROP_SIZE")
    assert _twin(read_trace(path)) == run.cached


def test_a_request_may_end_while_its_grammar_is_compiled(tmp_path: Path) -> None:
    """Its grammar is refused, or its client leaves."""
    path = tmp_path / "trace.jsonl"
    run = RecordedRun(path, small_settings(), seed=0)
    grammar = StructuredOutputsParams(regex="x")
    for status in (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED):
        blocked = run.add([1, 2, 3], max_tokens=1, structured_outputs=grammar)
        run.step()
        run.scheduler.finish_requests(blocked, status)
    run.add([1, 2, 3], max_tokens=1)
    run.step()
    run.scheduler.shutdown()
    assert _twin(read_trace(path, is_strict=True)) == run.cached
