"""Drafts of every length on the embedded checkpoint; tests/v1/spec_decode has the rest."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.v1.engine.test_cache_keeps_outputs import (
    MIN_SHARE,
    Session,
    count_compared,
    make_core,
    random_tokens,
)
from vllm.config import SpeculativeConfig
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.worker.step_input import StepInput

pytestmark = pytest.mark.slow

MAX_LEN = 500
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def mtp(k: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k}


class PartlyRight:
    """Runs a real drafter, then drafts known answers instead, each token wrong at times.

    The embedded checkpoint's MTP block is untrained and is never right by itself.
    """

    reads_all_rows = True

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


class Ragged(PartlyRight):
    """Drafts of any length, none included; notes which kinds of requests share a step."""

    def __init__(self, inner: Proposer, answers: dict[str, list[int]]) -> None:
        super().__init__(inner, answers)
        self.kinds_per_step: list[set[str]] = []

    def propose(self, step: StepInput, *rest: Any) -> list[list[int]]:
        self.kinds_per_step.append(
            {
                "chunk" if not count else "drafts" if drafts else "decode"
                for count, drafts in zip(step.sampled_counts, step.drafts, strict=True)
            }
        )
        drafts = super().propose(step, *rest)
        return [draft[: self._rng.randrange(len(draft) + 1)] for draft in drafts]


def test_chunks_decodes_and_drafts_of_any_length_share_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    rng = random.Random(12)
    prompts = [random_tokens(rng, rng.randrange(90, 260)) for _ in range(6)]
    plain = Session(make_core(32, num_blocks=800, budget=512, caching=False))
    for prompt in prompts:
        plain.add(prompt, 45)
        plain.run()
    core = make_core(32, num_blocks=800, budget=64, speculative=SpeculativeConfig.from_dict(mtp(4)))
    assert isinstance(core.executor, UniProcExecutor)
    runner = core.executor._worker._runner
    known = {request_id: answer.tokens for request_id, answer in plain.answers.items()}
    runner._proposer = proposer = Ragged(runner._proposer, known)
    session = Session(core)
    for prompt in prompts:
        session.add(prompt, 45)
        for _ in range(3):
            session.step()
    session.run()
    shared = [kinds for kinds in proposer.kinds_per_step if len(kinds) == 3]
    assert len(shared) >= 3
    compared = sum(
        count_compared(answer, session.answers[request_id])
        for request_id, answer in plain.answers.items()
    )
    assert compared >= MIN_SHARE * 6 * 45
