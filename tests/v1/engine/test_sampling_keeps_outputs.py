"""Everything a request can ask of the sampler, with drafts and preemptions: what is said stays.

The reference answers all requests together and without drafts. Drafts are then known answers with
wrong tokens in between, so that rows are accepted and refused at every place: before, at and behind
the end of the reasoning, inside a grammar, where a penalty or a bad word begins to count.
"""

import json
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.v1.engine.test_cache_keeps_outputs import make_core
from vllm.config import SpeculativeConfig
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.sampling_params import ReasoningSpan, SamplingParams, StructuredOutputsParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.params_completion import complete_from_tokenizer
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.worker.step_input import StepInput

pytestmark = pytest.mark.slow

DEADLINE_S = 120
# In the embedded vocabulary, as text that the model may well write.
END = [32, 33]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def structured(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


ASKS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.0},
    "greedy presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "greedy repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "greedy bias": {"temperature": 0.0, "logit_bias": {40: 2.0, 41: 2.0, 300: -100.0}},
    "greedy bad words": {"temperature": 0.0, "bad_words_token_ids": [[21], [20, 23], [40, 41, 42]]},
    "greedy min tokens": {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": [20, 40, 60]},
    "bias": {"logit_bias": {40: 6.0, 41: 5.0, 300: -100.0}, "min_p": 0.01},
    "allowed": {"allowed_token_ids": list(range(50, 90)), "top_k": 20},
    "bad words": {"allowed_token_ids": [20, 21], "bad_words_token_ids": [[20, 21], [21, 21, 21]]},
    "min tokens": {"min_tokens": 10, "stop_token_ids": list(range(10, 900))},
    "budget": {"thinking_token_budget": 9, "reasoning": ReasoningSpan(END)},
    "schema": {"structured_outputs": structured(json=SCHEMA)},
    "greedy schema": {"temperature": 0.0, "structured_outputs": structured(json=SCHEMA)},
    "grammar": {"structured_outputs": structured(grammar='start: ("ab" | "c" /[0-9]{1,3}/)+ "."')},
    "thinking, then a schema": {
        "thinking_token_budget": 7,
        "reasoning": ReasoningSpan(END),
        "structured_outputs": structured(json=SCHEMA),
        "frequency_penalty": 0.3,
    },
    "perhaps thinking, then a choice": {
        "thinking_token_budget": 5,
        "reasoning": ReasoningSpan(END, start_token_ids=[60]),
        "logit_bias": {60: 3.0},
        "structured_outputs": structured(choice=["yes", "no", "maybe"]),
    },
}


def make_params(ask: Mapping[str, Any], seed: int) -> SamplingParams:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 40, "seed": seed, **ask})
    params.eos_token_id = 1
    return params


class Crowd:
    """Requests of every kind in one core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        self.num_preemptions = 0
        self.num_accepted = 0

    def add(self, request_id: str, prompt: list[int], params: SamplingParams) -> None:
        self.tokens[request_id] = []
        message = EngineCoreRequest(request_id, prompt, params, time.time())
        self.core.add_request(self.core.make_request(message))

    def run(self, reset_every: int = 0) -> None:
        """Run to the end, preempting all that runs every so many steps."""
        deadline = time.monotonic() + DEADLINE_S
        num_steps = 0
        while self.core.has_work():
            assert time.monotonic() < deadline
            num_steps += 1
            if reset_every and num_steps % reset_every == 0:
                assert self.core.reset_prefix_cache(reset_running_requests=True)
            outputs, _ = self.core.step()
            assert not self.core.take_refusals()
            for batch in outputs.values():
                for output in batch.outputs:
                    self.tokens[output.request_id] += output.new_token_ids
                    self.num_preemptions += output.num_preemptions
                    self.num_accepted += output.num_accepted_tokens
        self.core.shutdown()


class PartlyRight:
    """Drafts known answers, each token wrong at times; notes how many drafts it made."""

    reads_all_rows = True

    def __init__(self, answers: Mapping[str, list[int]]) -> None:
        self._answers = answers
        self._rng = random.Random(5)

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        drafts: list[list[int]] = []
        for state, count in zip(step.requests, step.sampled_counts, strict=True):
            known = self._answers[state.req_id][state.num_tokens - state.num_prompt_tokens :]
            length = self._rng.randrange(5) if count else 0
            drafts.append([t if self._rng.random() < 0.8 else 35 for t in known[:length]])
        return drafts


def make_requests() -> dict[str, tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    return {
        f"{name} {seed}": (
            [rng.randrange(10, 2000) for _ in range(rng.randrange(5, 150))],
            make_params(ask, seed),
        )
        for seed in (1, 2)
        for name, ask in ASKS.items()
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Each request's answer, in an engine without a prefix cache."""
    crowd = Crowd(make_core(32, num_blocks=3000, budget=2048, caching=False))
    for request_id, (prompt, params) in make_requests().items():
        crowd.add(request_id, prompt, params)
    crowd.run()
    return crowd.tokens


def test_drafts_change_nothing(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    raw = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    core = make_core(32, num_blocks=800, budget=96, speculative=SpeculativeConfig.from_dict(raw))
    assert isinstance(core.executor, UniProcExecutor)
    drafter: Proposer = PartlyRight(expected)
    core.executor._worker._runner._proposer = drafter
    crowd = Crowd(core)
    for request_id, (prompt, params) in make_requests().items():
        crowd.add(request_id, prompt, params)
    crowd.run()
    assert crowd.tokens == expected


def test_the_models_own_drafts_change_nothing(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    raw = {"method": "mtp", "num_speculative_tokens": 3}
    core = make_core(32, num_blocks=800, budget=160, speculative=SpeculativeConfig.from_dict(raw))
    crowd = Crowd(core)
    for request_id, (prompt, params) in make_requests().items():
        crowd.add(request_id, prompt, params)
    crowd.run()
    assert crowd.num_accepted > 0
    assert crowd.tokens == expected


def test_preemption_and_chunks_change_nothing(
    expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    crowd = Crowd(make_core(32, num_blocks=800, budget=160))
    for request_id, (prompt, params) in make_requests().items():
        crowd.add(request_id, prompt, params)
    crowd.run(reset_every=40)
    assert crowd.num_preemptions > 0
    assert crowd.tokens == expected


def test_the_asks_are_met(expected: dict[str, list[int]]) -> None:
    """By what was said; that each is met exactly is for the sampler's own tests."""
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    for seed in (1, 2):
        for name in ("schema", "greedy schema"):
            tokens = expected[f"{name} {seed}"]
            if tokens[-1] == 1:
                assert set(json.loads(text(tokens))) == {"name", "size", "tags"}
        tokens = expected[f"thinking, then a schema {seed}"]
        end = next(i for i in range(2, len(tokens) + 1) if tokens[i - 2 : i] == END)
        assert end <= 7 + len(END)
        assert text(tokens[end:]).startswith("{")
        tokens = expected[f"perhaps thinking, then a choice {seed}"]
        end = 0 if tokens[0] != 60 else tokens.index(33) + 1
        assert end <= 1 + 5 + len(END)
        assert text(tokens[end:]) in ("yes", "no", "maybe")
        tokens = expected[f"bad words {seed}"]
        assert set(tokens) == {20, 21} or len(set(tokens)) == 1
        assert "20, 21" not in str(tokens)
        assert "21, 21, 21" not in str(tokens)
        assert set(expected[f"allowed {seed}"]) <= set(range(50, 90))
        assert len(expected[f"min tokens {seed}"]) >= 10


def test_a_prompt_that_leaves_reasoning_open_says_where_it_ends() -> None:
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    start, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    assert start is not None
    assert end is not None
    for prompt, span in (
        ([5, start, 7], ReasoningSpan([end])),
        ([5, start, 7, end, 8], None),
        ([5], None),
    ):
        params = SamplingParams(thinking_token_budget=3)
        complete_from_tokenizer(params, prompt, tokenizer)
        assert params.reasoning == span
