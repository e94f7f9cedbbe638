"""With drafts, sampled tokens follow the model's distribution: chi-square tests.

A verdict is the statistic of a chi-square test against the distribution that temperature, top-k,
top-p and min-p leave; its threshold is the quantile at ``CONFIDENCE``, so a right sampler fails one
of 10,000 such tests, and the seeds are fixed. The same verdict must refuse samplers that are wrong.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.tiny_checkpoint import make_tensors, tiny_config, write_checkpoint
from tests.v1.spec_decode.tiny_engine import NGRAM, NOISE, Session, make_core, mtp
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.sample.counter_rng import make_key
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import sample
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInputBuilder
from vllm.v1.worker.step_output import accept_tokens

VOCAB = 8
CONFIDENCE = 0.9999
NUM_DRAWS = 3000


def chi_square_quantile(degrees: int) -> float:
    """The quantile at ``CONFIDENCE``, by bisecting the distribution function."""
    low, high = 0.0, 1000.0
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    while high - low > 1e-6:
        middle = (low + high) / 2
        share = torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))
        low, high = (middle, high) if share < CONFIDENCE else (low, middle)
    return high


def is_plausible(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Whether counts can stem from probabilities; cells that expect under 5 are put together."""
    expected = probs * counts.sum()
    if (counts[probs == 0] > 0).any():
        return False
    big = expected >= 5
    seen = [*counts[big], counts[~big].sum()]
    wanted = [*expected[big], expected[~big].sum()]
    cells = [(s, w) for s, w in zip(seen, wanted, strict=True) if w >= 1]
    if len(cells) < 2:
        return True
    statistic = sum((s - w) ** 2 / w for s, w in cells)
    return bool(statistic <= chi_square_quantile(len(cells) - 1))


def plain_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, min-p, top-k and top-p in float64, one token at a time."""
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p:
            probs[token] = 0
        before += probs[token]
    return probs / probs.sum()


# Row i gives the logits after token i: a Markov chain, so a draft's fate depends on what came.
CHAIN = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5

Drafter = Callable[[int, int, np.random.Generator], list[int]]


def likeliest(token: int, k: int, _rng: np.random.Generator) -> list[int]:
    """What MTP does: the token it holds most likely, here by a model close to the target."""
    drafts = []
    for _ in range(k):
        token = int((CHAIN[token] + 0.5 * CHAIN[0]).argmax())
        drafts.append(token)
    return drafts


def drawn(token: int, k: int, rng: np.random.Generator) -> list[int]:
    """A drafter that samples from its own distribution."""
    drafts = []
    for _ in range(k):
        probs = torch.softmax(CHAIN[token] * 0.7 + 0.3 * CHAIN[1], -1).double().numpy()
        token = int(rng.choice(VOCAB, p=probs / probs.sum()))
        drafts.append(token)
    return drafts


def looked_up(token: int, k: int, _rng: np.random.Generator) -> list[int]:
    """One certain continuation, as prompt lookup has it."""
    return [(token + 1 + i) % VOCAB for i in range(k)]


def run_steps(
    drafter: Drafter, params: SamplingParams, *, accepts_all: bool = False
) -> tuple[np.ndarray, Counter[int]]:
    """Sample tokens of the chain in verified steps, many requests of one step each.

    Returns:
        Pairs ``[VOCAB, VOCAB]``: how often a token followed another, and how many drafts of each
        length were accepted.
    """
    k, rng = 3, np.random.default_rng(1)
    pairs = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    lengths: Counter[int] = Counter()
    builder = StepInputBuilder(256, 64)
    for first in range(0, NUM_DRAWS, 50):
        states, drafts = [], {}
        for i in range(first, first + 50):
            token = i % VOCAB
            state = RequestState(f"r{i}", [0, token], 2, params, make_key(i), 1)
            state.num_computed_tokens = 1
            states.append(state)
            drafts[state.req_id] = drafter(token, k, rng)
        step = builder.build(states, [k + 1] * 50, drafts)
        rows = [state.sampling for state in states for _ in range(k + 1)]
        logits = CHAIN[torch.from_numpy(step.token_ids)].clone()
        metadata = SamplingMetadata.build(rows, VOCAB, "cpu")
        sampled = sample(logits, metadata, step.positions + 1)
        if accepts_all:
            for i, state in enumerate(states):
                sampled.token_ids[i * (k + 1) : i * (k + 1) + k] = drafts[state.req_id]
        result = accept_tokens(step, sampled)
        for state, tokens in zip(states, result.sampled_token_ids, strict=True):
            lengths[len(tokens) - 1] += 1
            before = int(state.get_tokens(1, 2)[0])
            for token in tokens:
                pairs[before, token] += 1
                before = token
    return pairs, lengths


PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "top-p": SamplingParams(temperature=0.8, top_p=0.8),
    "all": SamplingParams(temperature=1.2, top_k=6, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("drafter", [likeliest, drawn, looked_up])
@pytest.mark.parametrize("name", sorted(PARAMS))
def test_verified_tokens_follow_the_distribution(name: str, drafter: Drafter) -> None:
    params = PARAMS[name]
    pairs, lengths = run_steps(drafter, params)
    assert {0, 1} < set(lengths), "acceptance and rejection take part"
    for before in range(VOCAB):
        probs = plain_probs(CHAIN[before].double().numpy(), params)
        assert is_plausible(pairs[before], probs), (before, pairs[before], probs)


@pytest.mark.parametrize("drafter", [likeliest, drawn, looked_up])
def test_a_sampler_that_accepts_everything_is_refused(drafter: Drafter) -> None:
    params = PARAMS["plain"]
    pairs, _ = run_steps(drafter, params, accepts_all=True)
    verdicts = [
        is_plausible(pairs[before], plain_probs(CHAIN[before].double().numpy(), params))
        for before in range(VOCAB)
    ]
    assert not all(verdicts)


def test_the_quantile() -> None:
    # From tables: 99.99% at 1, 5 and 20 degrees.
    for degrees, quantile in ((1, 15.137), (5, 25.745), (20, 52.386)):
        assert chi_square_quantile(degrees) == pytest.approx(quantile, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("raw", [mtp(3), NGRAM], ids=["mtp", "ngram"])
def test_an_engine_with_drafts_samples_from_the_distribution(
    raw: dict[str, object], tmp_path: Path
) -> None:
    """Pairs of tokens behind one prompt against what the logits of an undrafted engine say."""
    config = tiny_config()
    tensors = make_tensors(config, noise=NOISE, mtp_noise=NOISE)
    # Flatter logits: several tokens have a chance.
    tensors["head.weight"] *= 0.1
    write_checkpoint(tmp_path, config, tensors)
    plain = make_core(tmp_path, None, num_blocks=1500)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    # The text that repeats most, so that prompt lookup finds what the model says next.
    texts = [Session(plain).serve([3, 1, 4, 1, last], greedy).tokens for last in range(5, 21)]
    prompt = min(texts, key=lambda tokens: len(set(tokens))) * 3
    core = make_core(tmp_path, raw, num_blocks=1500)
    session = Session(core)
    params = {"temperature": 1.0, "top_k": 5, "max_tokens": 3, "ignore_eos": True}
    num_requests = 500
    for seed in range(num_requests):
        session.add(prompt, SamplingParams(seed=seed, **params))
    session.run()
    answers = [answer.tokens for answer in session.answers.values()]
    assert 100 < session.stats.num_accepted_tokens < session.stats.num_draft_tokens - 100
    num_checked = num_refused = 0
    for place in range(3):
        by_prefix: dict[tuple[int, ...], Counter[int]] = {}
        for tokens in answers:
            by_prefix.setdefault(tuple(tokens[:place]), Counter())[tokens[place]] += 1
        for prefix, counts in by_prefix.items():
            if counts.total() < 60:
                continue
            logprobs = find_logprobs(plain, [*prompt, *prefix])
            probs = plain_probs(logprobs, SamplingParams(**params))
            seen = np.array([counts[i] for i in range(len(probs))])
            assert is_plausible(seen, probs), (prefix, counts)
            wrong = plain_probs(logprobs, SamplingParams(temperature=0.5, top_k=5))
            num_refused += not is_plausible(seen, wrong)
            num_checked += 1
    assert num_checked >= 4
    assert num_refused > 0, "any distribution would pass"


def find_logprobs(core: object, prompt: list[int]) -> np.ndarray:
    """Return the log probabilities ``[V]`` of the token after a prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    name = str(len(prompt)) + str(prompt[-2:])
    request = EngineCoreRequest(name, prompt, params, time.time())
    core.add_request(core.make_request(request))  # type: ignore[attr-defined]
    found: np.ndarray | None = None
    while core.has_work():  # type: ignore[attr-defined]
        for batch in core.step()[0].values():  # type: ignore[attr-defined]
            for output in batch.outputs:
                rows = output.new_logprobs
                found = np.empty(len(rows.token_ids[0]) - 1)
                # Column 0 repeats the sampled token.
                found[rows.token_ids[0][1:]] = rows.logprobs[0][1:]
    assert found is not None
    return found
