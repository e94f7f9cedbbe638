"""What rejected drafts wrote is overwritten or never looked at."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.tiny_checkpoint import VOCAB_SIZE
from tests.v1.spec_decode.tiny_engine import Session, get_runner, make_core, mtp
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.worker.step_input import StepInput

pytestmark = pytest.mark.slow

NUM_PROMPT, NUM_ANSWER = 40, 100


class AlwaysWrong:
    """Runs a real drafter, then drafts tokens that the model does not say.

    Args:
        inner: The drafter.
        answer: What the model says.
    """

    reads_all_rows = True

    def __init__(self, inner: Proposer, answer: list[int]) -> None:
        self._inner = inner
        self._answer = answer
        self.num_wrong_entries = 0

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        drafts = self._inner.propose(step, streams, rebuilds)
        for state, draft in zip(step.requests, drafts, strict=True):
            place = state.num_tokens - state.num_prompt_tokens
            for i in range(len(draft)):
                said = self._answer[(place + i) % len(self._answer)]
                draft[i] = (said + 1 + i) % VOCAB_SIZE
            # Wrong tokens stand at num_tokens .. num_tokens + k - 1 in the next step.
            ends = range(state.num_tokens + 1, state.num_tokens + len(draft) + 1)
            self.num_wrong_entries += sum(end % 4 == 0 for end in ends)
        return drafts


def test_rows_of_rejected_tokens_are_never_seen(checkpoint: Path) -> None:
    prompt = [(5 * i * i + i) % VOCAB_SIZE for i in range(NUM_PROMPT)]
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True, logprobs=2)
    plain, drafted = (Session(make_core(checkpoint, raw)) for raw in (None, mtp(4)))
    expected = plain.serve(prompt, params)
    runner = get_runner(drafted.core)
    assert runner._proposer is not None
    wrong = AlwaysWrong(runner._proposer, expected.tokens)
    runner._proposer = wrong
    answer = drafted.serve(prompt, params)
    assert drafted.stats.num_accepted_tokens == 0
    assert wrong.num_wrong_entries > NUM_ANSWER / 2, "no entry was emitted at a rejected position"
    assert answer.tokens == expected.tokens
    for got, want in zip(answer.logprobs, expected.logprobs, strict=True):
        assert got == pytest.approx(want, abs=1e-3)

    # The next turn rests on what was published: it must not see them either.
    turn = prompt + expected.tokens + [1, 2, 3]
    first, second = plain.serve(turn, params), drafted.serve(turn, params)
    assert second.num_cached == first.num_cached >= 128
    assert second.tokens == first.tokens


def test_published_rows_hold_accepted_tokens(checkpoint: Path) -> None:
    """Compressed rows below a published boundary are those of an engine without drafts."""
    prompt = [(3 * i * i + i) % VOCAB_SIZE for i in range(NUM_PROMPT)]
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True)
    found = []
    for raw in (None, mtp(4)):
        session = Session(make_core(checkpoint, raw))
        tokens = session.serve(prompt, params).tokens
        manager = session.core.scheduler.kv_cache_manager
        layers = get_runner(session.core)._pool.layers
        request = session.core.make_request(_request([*prompt, *tokens]))
        lookup = manager.look_up(request)
        hit = lookup.num_tokens
        assert hit == 128
        assert lookup.hit is not None
        record = lookup.hit.checkpoint
        assert record is not None
        entry = lookup.hit.partial_blocks[0] or (lookup.hit.full_blocks[0][0], None)
        window = record.blocks[0]
        found.append(
            {
                "entries": layers["layers.1.attn.mla"][entry[0].block_id][: hit // 4],
                "index keys": layers["layers.1.attn.indexer"][entry[0].block_id][: hit // 4],
                "window": torch.cat([layers["layers.0.attn.window"][b.block_id] for b in window]),
            }
        )
    for name, rows in found[0].items():
        torch.testing.assert_close(found[1][name], rows, atol=1e-4, rtol=0, msg=name)
        assert rows.abs().sum() > 0


def _request(tokens: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest("look", tokens, SamplingParams(max_tokens=1), 0.0)
