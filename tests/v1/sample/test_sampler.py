"""The sampler: distributions, seeds, masks, mixed batches."""

import numpy as np
import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.counter_rng import make_key
from vllm.v1.sample.metadata import RandomRows, RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import SamplerOutput, find_highest, invert_cdf, sample

VOCAB = 12
DRAWS = 10_000
# 99.9% quantiles of chi-square by degrees of freedom.
CHI_SQUARE = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 11: 31.3}


def run(
    logits: torch.Tensor,
    params: list[SamplingParams],
    positions: list[int] | np.ndarray,
    num_prompt_tokens: int = 0,
) -> SamplerOutput:
    rows = [
        RowSampling(p, make_key(p.seed if p.seed is not None else i), num_prompt_tokens)
        for i, p in enumerate(params)
    ]
    metadata = SamplingMetadata.build(rows, logits.shape[-1], "cpu")
    return sample(logits.clone(), metadata, np.asarray(positions))


def base_logits() -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5


def expected_probs(params: SamplingParams) -> np.ndarray:
    """Plain float64: temperature, min-p, top-k, top-p, renormalise."""
    scaled = base_logits()[0].double().numpy() / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    keep = probs >= params.min_p * probs.max()
    if params.top_k > 0:
        keep &= probs >= np.sort(np.where(keep, probs, 0))[::-1][params.top_k - 1]
    probs = np.where(keep, probs, 0)
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    kept = order[before < params.top_p]
    final = np.zeros_like(probs)
    final[kept] = probs[kept]
    return final / final.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)
def test_distribution(options: dict) -> None:
    params = SamplingParams(seed=99, **options)
    logits = base_logits().expand(DRAWS, VOCAB)
    tokens = run(logits, [params] * DRAWS, np.arange(DRAWS)).token_ids
    probs = expected_probs(params)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[probs == 0].any()
    support = probs > 0
    wanted = probs[support] * DRAWS
    statistic = float(((counts[support] - wanted) ** 2 / wanted).sum())
    assert statistic < CHI_SQUARE[int(support.sum()) - 1]


def test_greedy_takes_the_argmax_in_a_mixed_batch() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    greedy, random = SamplingParams(temperature=0), SamplingParams(seed=4, top_k=4)
    params = [greedy, random, greedy, random, greedy, random]
    tokens = run(logits, params, [5] * 6).token_ids
    best = logits.argmax(-1).tolist()
    assert tokens[::2].tolist() == best[::2]
    for row in (1, 3, 5):
        assert tokens[row] in logits[row].topk(4).indices


@pytest.mark.parametrize("values", [2, 3, 500])
def test_the_highest_logit_is_torchs(values: int) -> None:
    logits = torch.randint(values, (40, 301), generator=torch.Generator().manual_seed(1)).float()
    logits[3] = -torch.inf
    logits[4, 200] = logits[5, :9] = logits[6] = torch.nan
    for rows in (logits, logits[::3, 5:], logits[:0]):
        found = find_highest(rows)
        assert found.dtype == torch.int64
        assert torch.equal(found, rows.argmax(-1))


def test_a_seeded_row_is_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(10, VOCAB, generator=generator)
    options = [
        {},
        {"top_k": 2},
        {"top_p": 0.4},
        {"min_p": 0.3},
        {"temperature": 0.3},
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.9},
        {"logprobs": 3},
        {"temperature": 2.0},
        {"top_p": 0.99, "min_p": 0.01},
    ]
    params = [SamplingParams(seed=i, **o) for i, o in enumerate(options)]
    positions = np.arange(10) * 3
    alone = [
        int(run(logits[i : i + 1], [params[i]], positions[i : i + 1]).token_ids[0])
        for i in range(10)
    ]
    assert run(logits, params, positions).token_ids.tolist() == alone
    order = [3, 1, 9, 0, 5, 2, 8, 4, 7, 6]
    mixed = run(logits[order], [params[i] for i in order], positions[order])
    assert mixed.token_ids.tolist() == [alone[i] for i in order]


def test_another_seed_or_position_draws_anew() -> None:
    logits = torch.zeros(400, 50)
    same = run(logits, [SamplingParams(seed=1)] * 400, np.full(400, 7)).token_ids
    assert len(set(same.tolist())) == 1
    moved = run(logits, [SamplingParams(seed=1)] * 400, np.arange(400)).token_ids
    assert len(set(moved.tolist())) > 40
    seeded = run(logits, [SamplingParams(seed=s) for s in range(400)], np.full(400, 7)).token_ids
    assert len(set(seeded.tolist())) > 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_stops_back_until_reached(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2, stop_token_ids=[3], seed=0)
    params.update_from_generation_config({}, 5)
    logits = torch.full((4, VOCAB), -10.0)
    logits[:, 3], logits[:, 5], logits[:, 7] = 30.0, 29.0, 20.0
    # Prompt of 10: positions 10 and 11 are the first two tokens of the answer.
    tokens = run(logits, [params] * 4, [10, 11, 12, 13], num_prompt_tokens=10).token_ids
    assert tokens[:2].tolist() == [7, 7]
    assert set(tokens[2:].tolist()) <= {3, 5}


def test_logprobs_ignore_temperature_filters_and_min_tokens() -> None:
    params = SamplingParams(
        temperature=0.2, top_k=1, min_tokens=5, stop_token_ids=[0], logprobs=2, seed=0
    )
    logits = torch.tensor([[5.0, 4.0, 1.0, 0.0]])
    output = run(logits, [params], [0])
    assert output.token_ids.tolist() == [1]
    assert output.logprobs is not None
    expected = logits.log_softmax(-1)[0]
    assert output.logprobs.logprob_token_ids.tolist() == [[1, 0, 1]]
    np.testing.assert_allclose(output.logprobs.logprobs[0], expected[[1, 0, 1]], atol=1e-6)
    assert output.logprobs.sampled_token_ranks.tolist() == [2]


def test_logprobs_are_those_of_logits_that_a_draw_overwrites() -> None:
    def draw(logits: torch.Tensor, random: RandomRows, uniforms: np.ndarray) -> torch.Tensor:
        logits.exp_()
        return torch.zeros(len(logits), dtype=torch.int64)

    rows = [RowSampling(SamplingParams(seed=1, logprobs=2), make_key(1), 0)]
    metadata = SamplingMetadata.build(rows, VOCAB, "cpu")
    found = sample(base_logits(), metadata, np.array([5]), draw=draw).logprobs
    assert found is not None
    assert found.logprobs[0, 0] == base_logits().log_softmax(-1)[0, 0]


def test_invert_cdf_never_picks_a_token_without_mass() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    edges = [0.0, 0.24999, 0.25, 0.5, 1 - 2.0**-24]
    picked = invert_cdf(probs.expand(5, -1), torch.tensor(edges))
    assert picked.tolist() == [1, 1, 3, 3, 3]


def test_logits_of_nan_do_not_end_the_engine() -> None:
    output = run(torch.full((2, VOCAB), torch.nan), [SamplingParams(seed=1)] * 2, [0, 0])
    assert ((output.token_ids >= 0) & (output.token_ids < VOCAB)).all()


def test_a_nucleus_too_small_for_a_float_holds_the_most_likely_token() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    tokens = run(logits, [SamplingParams(top_p=1e-50, seed=i) for i in range(3)], [4] * 3).token_ids
    assert tokens.tolist() == logits.argmax(-1).tolist()
