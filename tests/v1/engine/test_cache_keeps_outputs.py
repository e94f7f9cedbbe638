"""Real model, real engine: hits, chunking, batching and preemption do not change what is said.

Multi-turn, fan-out and edited prompts run on the embedded checkpoint in a pool so small that
everything is evicted, copied and preempted all the time, with I1..I5 checked after every step. The
reference runs each prompt with its answer once more, alone and in one pass, in an engine without a
prefix cache: at every token the model must prefer the one that was said. fp32 sums depend on the
batch in their last bits, and a random model has near-ties, so tokens whose two best candidates lie
closer than ``MARGIN`` are passed over; nearly all must be compared.
"""

import random
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.sizes import max_request_blocks
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreRequest, FinishReason, LogprobsRows, PrefillStats
from vllm.v1.request_options import RequestOptions

pytestmark = pytest.mark.slow

MARGIN = 1e-4
MIN_SHARE = 0.95


@dataclass
class Answer:
    """What one request produced, and how often it was preempted on the way."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    stats: PrefillStats | None = None
    num_preemptions: int = 0
    prompt_rows: LogprobsRows | None = None
    transfer: dict[str, Any] | None = None
    finish_reason: FinishReason | None = None


def make_core(
    unit: int,
    *,
    num_blocks: int,
    budget: int,
    caching: bool = True,
    max_len: int = 1024,
    speculative: SpeculativeConfig | None = None,
    platform: Platform | None = None,
    cache_dtype: str = "auto",
    transfer: KVTransferConfig | None = None,
    is_ahead: bool = False,
) -> EngineCore:
    checkpoint = resolve_checkpoint("deepseek-v4")
    model = ModelConfig(
        "deepseek-v4",
        path=str(checkpoint.path),
        is_embedded=True,
        hf_config=read_hf_config(checkpoint.path),
        max_model_len=max_len,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            block_size=unit,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=caching,
            cache_dtype=cache_dtype,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=max_len,
            max_num_batched_tokens=budget,
            max_num_seqs=16,
            async_scheduling=is_ahead or None,
        ),
        speculative_config=speculative,
        kv_transfer_config=transfer,
    )
    return EngineCore(config, partial(UniProcExecutor, platform=platform))


class Session:
    """Feeds a core and gathers what comes out."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}
        self.prompts: dict[str, tuple[list[int], int]] = {}

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        prompt_logprobs: int | None = None,
        transfer: dict[str, Any] | None = None,
        cache_ttls: dict[int, float] | None = None,
        skip_cache_insert: bool = False,
        **params: Any,
    ) -> str:
        request_id = f"q{len(self.prompts)}"
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=prompt_logprobs,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
            **params,
        )
        options = RequestOptions(cache_ttls=cache_ttls or {}, skip_cache_insert=skip_cache_insert)
        message = EngineCoreRequest(request_id, prompt, sampling, time.time(), options=options)
        self.prompts[request_id] = (prompt, max_tokens)
        self.answers[request_id] = Answer()
        self.core.add_request(self.core.make_request(message))
        return request_id

    @property
    def num_preemptions(self) -> int:
        return sum(answer.num_preemptions for answer in self.answers.values())

    def step(self) -> None:
        for request_id, request in self.core.scheduler.requests.items():
            self.answers[request_id].num_preemptions = request.num_preemptions
        outputs, _ = self.core.step()
        for batch in outputs.values():
            for output in batch.outputs:
                answer = self.answers[output.request_id]
                answer.tokens += output.new_token_ids
                answer.transfer = output.kv_transfer_params or answer.transfer
                answer.finish_reason = output.finish_reason
                if output.new_logprobs is not None:
                    # Column 0 is the sampled token, columns 1 and 2 the two best.
                    rows = output.new_logprobs.logprobs
                    answer.margins += [row[1] - row[2] for row in rows]
                if output.prefill_stats is not None:
                    answer.stats = output.prefill_stats
                if output.new_prompt_logprobs is not None:
                    answer.prompt_rows = output.new_prompt_logprobs

    def run(self) -> None:
        while self.core.has_work():
            self.step()


def count_compared(expected: Answer, actual: Answer) -> int:
    """Check two answers up to the first near-tie; return how many tokens that were."""
    for i, (want, margin) in enumerate(zip(expected.tokens, expected.margins, strict=True)):
        if margin < MARGIN:
            return i
        assert actual.tokens[i] == want, f"token {i}: {actual.tokens[i]} != {want}, {margin=}"
    assert len(actual.tokens) == len(expected.tokens)
    return len(expected.tokens)


def count_preferred(reference: Session, prompt: list[int], tokens: list[int]) -> int:
    """Check that a model alone would say each token of an answer; return how many are no near-tie.

    Args:
        reference: An engine that takes a whole prompt in one step.
        prompt: Tokens before the answer.
        tokens: The answer.
    """
    request_id = reference.add([*prompt, *tokens], 1, prompt_logprobs=2)
    reference.run()
    rows = reference.answers[request_id].prompt_rows
    assert rows is not None
    # The first token has no row; columns 1 and 2 are the two best.
    first = len(prompt) - 1
    assert len(rows.logprobs) == first + len(tokens)
    count = 0
    for token, ids, logprobs in zip(
        tokens, rows.token_ids[first:], rows.logprobs[first:], strict=True
    ):
        if logprobs[1] - logprobs[2] >= MARGIN:
            assert ids[1] == token, f"{token} was said, {ids[1]} is preferred"
            count += 1
    return count


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 2000) for _ in range(count)]


def drive(
    session: Session, rng: random.Random, num_requests: int, max_len: int, first_len: int = 400
) -> None:
    """Multi-turn, fan-out and edited prompts, arriving while others run."""
    histories = [random_tokens(rng, rng.randrange(1, first_len)) for _ in range(3)]
    for _ in range(num_requests):
        base = list(rng.choice(histories))
        kind = rng.random()
        if kind < 0.25:
            base[rng.randrange(len(base))] = 5
        elif kind < 0.5:
            base = base[: rng.randrange(1, len(base) + 1)]
        prompt = (base + random_tokens(rng, rng.randrange(60)))[: max_len - 60]
        session.add(prompt, rng.randrange(1, 30))
        for _ in range(rng.randrange(12)):
            session.step()
        done = [k for k, a in session.answers.items() if len(a.tokens) == session.prompts[k][1]]
        if done and rng.random() < 0.5:
            request_id = rng.choice(done)
            histories.append(session.prompts[request_id][0] + session.answers[request_id].tokens)
    session.run()


def crowd(session: Session, rng: random.Random, num_requests: int) -> None:
    """Short prompts with long answers, all at once: they fit, and then outgrow the pool."""
    base = random_tokens(rng, 100)
    for _ in range(num_requests):
        prompt = base[: rng.randrange(1, 90)] + random_tokens(rng, rng.randrange(1, 20))
        session.add(prompt, rng.randrange(20, 190))
    session.run()


@pytest.mark.parametrize(("unit", "pins"), [(32, "0"), (64, "1"), (128, "0")])
def test_same_tokens_under_a_pool_that_is_always_full(
    unit: int, pins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_len = 450
    probe = make_core(unit, num_blocks=2000, budget=2048, caching=False, max_len=max_len)
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", pins)
    geometry = CacheGeometry.from_config(probe.scheduler.kv_cache_config)
    smallest = max_request_blocks(geometry, max_len) + 1
    core = make_core(unit, num_blocks=smallest + 8, budget=256, max_len=max_len)
    session = Session(core)
    rng = random.Random(unit + 1)
    drive(session, rng, num_requests=12, max_len=max_len)
    pinned = core.scheduler.kv_cache_manager.block_pool.pins
    # Asked before the crowd, for which pins are given up.
    assert (pins == "1") == (pinned is not None and any(True for _ in pinned))
    crowd(session, rng, num_requests=14)

    total = compared = cached = 0
    reference = Session(probe)
    for request_id, (prompt, max_tokens) in session.prompts.items():
        actual = session.answers[request_id]
        assert len(actual.tokens) == max_tokens
        compared += count_preferred(reference, prompt, actual.tokens)
        total += max_tokens
        assert actual.stats is not None
        assert actual.stats.num_cached_tokens + sum(actual.stats.miss_tokens.values()) == len(
            prompt
        )
        cached += actual.stats.num_cached_tokens
    assert cached > 0, "the traffic must hit, or the test shows nothing"
    assert session.num_preemptions > 0, "the traffic must preempt, or the test shows too little"
    assert compared / total >= MIN_SHARE, f"only {compared} of {total} tokens were comparable"
    assert core.scheduler.kv_cache_manager.usage == 0


def test_preemption_really_happens_and_changes_nothing() -> None:
    max_len = 300
    alone_core = make_core(32, num_blocks=2000, budget=2048, caching=False, max_len=max_len)
    geometry = CacheGeometry.from_config(alone_core.scheduler.kv_cache_config)
    core = make_core(
        32, num_blocks=max_request_blocks(geometry, max_len) + 1, budget=512, max_len=max_len
    )
    rng = random.Random(3)
    session, alone = Session(core), Session(alone_core)
    ids = [session.add(random_tokens(rng, 20), 60) for _ in range(8)]
    session.run()
    assert session.num_preemptions > 0
    compared = sum(
        count_preferred(alone, session.prompts[request_id][0], session.answers[request_id].tokens)
        for request_id in ids
    )
    assert compared >= MIN_SHARE * sum(session.prompts[request_id][1] for request_id in ids)


def test_a_copied_block_serves_hits_when_its_source_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that is answered twice side by side: the second answer's copy outlives the first."""
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    # The last block of compressed entries, 480 to 500, is partly covered.
    prompt = random_tokens(random.Random(5), 500)
    core = make_core(32, num_blocks=1500, budget=1024)
    session, manager = Session(core), core.scheduler.kv_cache_manager
    first = session.add(prompt, 60)
    session.step()
    session.step()
    second = session.add(prompt, 12)
    session.step()
    tables = [manager.get_block_ids(name) for name in (first, second)]
    copied = [
        theirs
        for one, other in zip(*tables, strict=True)
        for theirs, ours in zip(one, other, strict=False)
        if theirs != ours
    ]
    assert copied
    session.run()
    manager.block_pool.evict_blocks(copied)
    third = session.add(prompt, 12)
    session.run()
    stats = session.answers[third].stats
    assert stats is not None
    assert stats.num_cached_tokens == 480
    assert count_compared(session.answers[third], session.answers[second]) >= 10


@pytest.mark.parametrize("unit", [32, 128])
def test_a_spare_checkpoint_holds_the_rows_that_were_computed(
    unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second prompt hits where nobody had asked for a checkpoint, and is answered the same."""
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    rng = random.Random(unit)
    shared = random_tokens(rng, 750)
    prompts = [shared + random_tokens(rng, count) for count in (150, 100)]
    prompts.append(shared[:350] + random_tokens(rng, 50))
    answers = []
    for caching in (True, False):
        core = make_core(unit, num_blocks=1500, budget=512, max_len=1024, caching=caching)
        session = Session(core)
        for prompt in prompts:
            session.add(prompt, 12)
            session.run()
        answers.append(list(session.answers.values()))
    hits = [answer.stats.num_cached_tokens for answer in answers[0] if answer.stats is not None]
    assert hits[0] == 0
    # The prompts part at 750, where none had before; the first one's first chunk ended at 512.
    assert hits[1] >= 512
    assert sum(map(count_compared, answers[1], answers[0])) >= 0.8 * 12 * len(prompts)
