"""Drafts change how fast tokens come, never which: random traffic on a model that is often right.

The script of requests and the answers they must get come from one engine without drafts and without
a prefix cache. fp32 sums depend on the batch in their last bits, so answers are compared up to the
first token whose two best candidates lie closer than ``MARGIN``; nearly all must be compared.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_checkpoint import VOCAB_SIZE
from tests.v1.spec_decode.tiny_engine import NGRAM, Answer, Session, make_core, mtp
from vllm.sampling_params import SamplingParams
from vllm.v1.core.geometry import CacheGeometry
from vllm.v1.core.retention.sizes import max_request_blocks

pytestmark = pytest.mark.slow

MARGIN = 1e-4
MIN_SHARE = 0.95
MAX_LEN = 400


@dataclass(frozen=True)
class Planned:
    """One request of the script.

    Attributes:
        gap: Steps before it arrives.
        abort_at: Tokens of its answer at which it is aborted; None: it runs to its end.
        expected: Its answer without drafts.
    """

    prompt: list[int]
    params: SamplingParams
    gap: int
    abort_at: int | None
    expected: Answer


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def make_script(checkpoint: Path, seed: int, rounds: int) -> list[Planned]:
    """Plan multi-turn, fan-out, resent and edited prompts, with all ways to end."""
    rng = random.Random(seed)
    reference = Session(
        make_core(checkpoint, None, num_blocks=2000, caching=False, max_len=MAX_LEN)
    )
    histories = [random_tokens(rng, rng.randrange(30, 250)) for _ in range(3)]
    script: list[Planned] = []
    # Short prompts at once that all grow: the pool cannot hold their answers.
    params = SamplingParams(temperature=0, logprobs=2, max_tokens=60, ignore_eos=True)
    burst = [reference.add(random_tokens(rng, 20), params) for _ in range(10)]
    reference.run()
    for name in burst:
        expected = reference.answers[name]
        script.append(Planned(expected.prompt, params, 0, None, expected))
    for _ in range(rounds):
        batch = []
        for history in histories:
            prompt = list(history)
            kind = rng.random()
            if kind < 0.2:
                prompt[rng.randrange(len(prompt))] = 5
            elif kind < 0.4:
                prompt = prompt[: rng.randrange(1, len(prompt) + 1)]
            elif kind < 0.8:
                prompt += random_tokens(rng, rng.randrange(1, 30))
            prompt = prompt[: MAX_LEN - 70]
            max_tokens = rng.randrange(8, 60)
            params = SamplingParams(
                temperature=0,
                logprobs=2,
                max_tokens=max_tokens,
                min_tokens=min(max_tokens, rng.choice([0, 12])),
                ignore_eos=True,
                # Answers meet one of so many tokens soon.
                stop_token_ids=rng.sample(range(VOCAB_SIZE), rng.choice([0, 40])),
            )
            batch.append((prompt, params, reference.add(prompt, params)))
        reference.run()
        for prompt, params, name in batch:
            expected = reference.answers[name]
            gap = rng.randrange(6)
            abort_at = rng.randrange(1, 16) if rng.random() < 0.3 else None
            script.append(Planned(prompt, params, gap, abort_at, expected))
        histories = [
            (prompt + reference.answers[name].tokens)[: MAX_LEN - 100] for prompt, _, name in batch
        ]
        histories[rng.randrange(3)] = rng.choice(histories)[: rng.randrange(32, 200)]
    return script


def play(session: Session, script: list[Planned]) -> set[str]:
    """Run the script; returns the requests that were aborted while they ran."""
    aborted: set[str] = set()
    limits: dict[str, int] = {}

    def step() -> None:
        session.step()
        for name, num_tokens in limits.items():
            answer = session.answers[name]
            if answer.finish is None and name not in aborted and len(answer.tokens) >= num_tokens:
                session.core.abort_requests([name])
                aborted.add(name)

    for planned in script:
        for _ in range(planned.gap):
            step()
        name = session.add(planned.prompt, planned.params)
        if planned.abort_at is not None:
            limits[name] = planned.abort_at
    while session.core.has_work():
        step()
    return aborted


def count_compared(expected: Answer, actual: Answer, *, is_whole: bool) -> int:
    """Check an answer up to the first near-tie; returns how many tokens that were."""
    for i, want in enumerate(expected.tokens):
        if i == len(actual.tokens) and not is_whole:
            return i
        if expected.margins[i] < MARGIN:
            return i
        assert actual.tokens[i] == want, f"token {i}: {actual.tokens[i]} != {want}"
        assert actual.logprobs[i] == pytest.approx(expected.logprobs[i], abs=1e-3)
    assert actual.tokens == expected.tokens
    assert actual.finish == (expected.finish if is_whole else None)
    return len(expected.tokens)


@pytest.fixture(scope="module")
def script(checkpoint: Path) -> list[Planned]:
    return make_script(checkpoint, seed=5, rounds=7)


def test_the_script_has_what_it_must(script: list[Planned]) -> None:
    endings = {planned.expected.finish for planned in script}
    assert endings == {"stop", "length"}
    assert sum(len(planned.expected.tokens) for planned in script) > 500


CASES: list[tuple[dict[str, Any], int]] = [
    (mtp(1), 32),
    (mtp(2), 64),
    (mtp(3), 128),
    (mtp(4), 32),
    (mtp(4, stale_row="keep"), 64),
    (mtp(2, stale_row="drop"), 32),
    (NGRAM, 32),
    (NGRAM, 128),
]


@pytest.mark.parametrize(("raw", "unit"), CASES, ids=str)
def test_greedy_answers_are_those_without_drafts(
    raw: dict[str, Any], unit: int, checkpoint: Path, script: list[Planned]
) -> None:
    probe = make_core(checkpoint, raw, unit=unit, num_blocks=2000, max_len=MAX_LEN)
    geometry = CacheGeometry.from_config(probe.scheduler.kv_cache_config)
    smallest = max_request_blocks(geometry, MAX_LEN, probe.scheduler.limits.num_lookahead_tokens)
    core = make_core(
        checkpoint, raw, unit=unit, num_blocks=smallest + 12, budget=160, max_len=MAX_LEN
    )
    session = Session(core)
    aborted = play(session, script)
    compared = total = 0
    for planned, (name, actual) in zip(script, session.answers.items(), strict=True):
        is_whole = name not in aborted
        compared += count_compared(planned.expected, actual, is_whole=is_whole)
        total += len(planned.expected.tokens if is_whole else actual.tokens)
    answers = session.answers.values()
    assert compared >= MIN_SHARE * total, f"only {compared} of {total} tokens were comparable"
    # Each of these happened, or the comparison shows less than it says.
    assert sum(answer.num_cached for answer in answers) > 500
    assert sum(answer.num_preemptions for answer in answers) > 0
    assert any(len(answer.prompt) > 160 for answer in answers), "no prompt came in chunks"
    assert any(session.answers[name].tokens for name in aborted), "no abort in mid-answer"
    per_pos = session.stats.num_accepted_tokens_per_pos
    assert all(per_pos[i] > 0 for i in range(raw["num_speculative_tokens"])), per_pos
    assert session.stats.num_accepted_tokens < session.stats.num_draft_tokens
    assert core.scheduler.kv_cache_manager.usage == 0


def test_sampled_tokens_of_a_seed_are_those_without_drafts(checkpoint: Path) -> None:
    rng = random.Random(1)
    prompts = [random_tokens(rng, 4) * 12 for _ in range(6)]
    answers = []
    for raw in (None, mtp(3), NGRAM):
        session = Session(make_core(checkpoint, raw))
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=1.5, top_k=40, seed=seed, max_tokens=30, ignore_eos=True
            )
            session.add(prompt, params)
        session.run()
        answers.append([answer.tokens for answer in session.answers.values()])
        assert raw is None or session.stats.num_accepted_tokens > 0
    assert answers[0] == answers[1] == answers[2]
