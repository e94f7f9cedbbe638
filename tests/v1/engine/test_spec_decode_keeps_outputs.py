"""Drafts change how fast tokens come, never which: real model, real engine, small pool."""

import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.v1.engine.test_cache_keeps_outputs import (
    MIN_SHARE,
    Session,
    count_compared,
    drive,
    make_core,
    random_tokens,
)
from vllm.config import SpeculativeConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.retention import CacheGeometry, max_request_blocks
from vllm.v1.engine.messages import EngineCoreRequest
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.worker.step_input import StepInput

pytestmark = pytest.mark.slow

MAX_LEN = 500
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def mtp(k: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k}


@pytest.mark.parametrize("raw", [mtp(1), mtp(2), mtp(3), mtp(4), NGRAM], ids=str)
def test_greedy_tokens_are_those_without_drafts(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    probe = make_core(32, num_blocks=2000, budget=2048, caching=False, max_len=MAX_LEN)
    geometry = CacheGeometry.from_config(probe.scheduler.kv_cache_config)
    smallest = max_request_blocks(geometry, MAX_LEN, 4) + 1
    core = make_core(
        32,
        num_blocks=smallest + 20,
        budget=256,
        max_len=MAX_LEN,
        speculative=SpeculativeConfig.from_dict(raw),
    )
    session = Session(core)
    drive(session, random.Random(7), num_requests=12, max_len=MAX_LEN)
    reference = Session(probe)
    total = compared = cached = 0
    for request_id, (prompt, max_tokens) in session.prompts.items():
        alone = reference.add(prompt, max_tokens)
        reference.run()
        actual = session.answers[request_id]
        assert len(actual.tokens) == len(actual.margins) == max_tokens
        compared += count_compared(reference.answers[alone], actual)
        total += max_tokens
        assert actual.stats is not None
        cached += actual.stats.num_cached_tokens
    assert cached > 0
    assert compared / total >= MIN_SHARE
    assert core.scheduler.kv_cache_manager.usage == 0


def test_sampled_tokens_of_a_seed_are_those_without_drafts() -> None:
    rng = random.Random(1)
    prompts = [random_tokens(rng, 4) * 12 for _ in range(6)]
    answers = []
    for raw in (None, mtp(2), NGRAM):
        speculative = SpeculativeConfig.from_dict(raw) if raw else None
        core = make_core(32, num_blocks=800, budget=512, speculative=speculative)
        tokens: dict[str, list[int]] = {}
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0.9, top_k=4, seed=i, max_tokens=30, ignore_eos=True
            )
            request = EngineCoreRequest(f"s{i}", list(prompt), params, time.time())
            tokens[f"s{i}"] = []
            core.add_request(core.make_request(request))
        while core.has_work():
            for batch in core.step()[0].values():
                for output in batch.outputs:
                    tokens[output.request_id] += output.new_token_ids
        answers.append(tokens)
    assert answers[0] == answers[1] == answers[2]


def test_hits_are_as_long_with_mtp_and_drafts_are_verified() -> None:
    cached, verified = [], []
    for raw in (None, mtp(2), NGRAM):
        speculative = SpeculativeConfig.from_dict(raw) if raw else None
        core = make_core(32, num_blocks=800, budget=512, speculative=speculative)
        core.scheduler.log_stats = True
        rng = random.Random(2)
        base, session, drafted, accepted = random_tokens(rng, 8) * 25, Session(core), 0, 0
        lengths = []
        # First, resend, and a fork whose next token differs from the cached one's.
        for prompt in (base, base, base[:160] + random_tokens(rng, 40)):
            request_id = session.add(list(prompt), 24)
            while core.has_work():
                outputs, _ = core.step()
                for batch in outputs.values():
                    for output in batch.outputs:
                        if output.prefill_stats is not None:
                            lengths.append(output.prefill_stats.num_cached_tokens)
                    stats = batch.scheduler_stats
                    if stats is not None and stats.spec_decoding_stats is not None:
                        drafted += stats.spec_decoding_stats.num_draft_tokens
                        accepted += stats.spec_decoding_stats.num_accepted_tokens
            assert request_id in session.answers
        cached.append(lengths)
        verified.append((drafted, accepted))
    assert cached[0] == cached[1] == cached[2]
    assert max(cached[0]) > 0
    assert verified[0] == (0, 0)
    assert verified[1][0] > 0
    assert verified[2][0] > 0


class PartlyRight:
    """Runs a real drafter, then drafts known answers instead, each token wrong at times.

    The embedded checkpoint's MTP block is untrained and is never right by itself.
    """

    def __init__(self, inner: Proposer, answers: dict[str, list[int]]) -> None:
        self._inner = inner
        self._answers = answers
        self._rng = random.Random(5)

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        drafts = self._inner.propose(step, streams, rebuilds)
        for state, draft in zip(step.requests, drafts, strict=True):
            known = self._answers[state.req_id][state.num_tokens - state.num_prompt_tokens :]
            for i, token in enumerate(known[: len(draft)]):
                draft[i] = token if self._rng.random() < 0.7 else 5
        return drafts


def test_partly_accepted_drafts_of_a_running_mtp_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    rng = random.Random(11)
    prompts = [random_tokens(rng, rng.randrange(20, 200)) for _ in range(5)]
    plain = Session(make_core(32, num_blocks=800, budget=128, caching=False))
    for prompt in prompts:
        plain.add(prompt, 60)
        plain.run()
    core = make_core(
        32, num_blocks=800, budget=128, speculative=SpeculativeConfig.from_dict(mtp(4))
    )
    assert isinstance(core.executor, UniProcExecutor)
    runner = core.executor._worker._runner
    known = {request_id: answer.tokens for request_id, answer in plain.answers.items()}
    runner._proposer = PartlyRight(runner._proposer, known)
    session = Session(core)
    for prompt in prompts:
        session.add(prompt, 60)
    num_steps = 0
    while core.has_work():
        session.step()
        num_steps += 1
    assert num_steps < 45, "most steps must bring more than one token"
    compared = sum(
        count_compared(answer, session.answers[request_id])
        for request_id, answer in plain.answers.items()
    )
    assert compared >= MIN_SHARE * 300
