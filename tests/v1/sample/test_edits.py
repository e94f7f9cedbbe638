"""Edits of logits against a plain oracle that treats one row and one token after another."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from vllm.sampling_params import ReasoningSpan, SamplingParams
from vllm.v1.sample.edits import RowMask, StepEdits
from vllm.v1.sample.history import make_history
from vllm.v1.sample.metadata import RowSampling, SamplingMetadata
from vllm.v1.sample.sampler import sample

VOCAB = 75
CPU = torch.device("cpu")
END = [7, 9]


def oracle(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int]
) -> np.ndarray:
    """One row's edited logits, in float64, token by token."""
    row = logits.astype(np.float64)
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -np.inf
        for word in params.bad_words_token_ids or ():
            head = word[:-1]
            if token == word[-1] and answer[len(answer) - len(head) :] == head:
                row[token] = -np.inf
        if len(answer) < params.min_tokens and token in (params.stop_token_ids or ()):
            row[token] = -np.inf
        row[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt + answer:
            factor = params.repetition_penalty
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        count = answer.count(token)
        row[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return row


def random_params(rng: random.Random) -> SamplingParams:
    def some(value: Any) -> Any:
        return value if rng.random() < 0.5 else None

    fields = {
        "presence_penalty": some(rng.uniform(-2, 2)),
        "frequency_penalty": some(rng.uniform(-2, 2)),
        "repetition_penalty": some(rng.uniform(0.5, 2)),
        "logit_bias": some({rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(3)}),
        "allowed_token_ids": some([rng.randrange(VOCAB) for _ in range(30)]),
        "bad_words_token_ids": some(
            [[rng.randrange(8) for _ in range(rng.randrange(1, 4))] for _ in range(6)]
        ),
        "min_tokens": some(rng.randrange(8)),
        "stop_token_ids": some([rng.randrange(VOCAB) for _ in range(4)]),
    }
    return SamplingParams(temperature=0.0, **{k: v for k, v in fields.items() if v is not None})


def edit(
    logits: torch.Tensor,
    rows: Sequence[tuple[SamplingParams, list[int], list[int], list[int]]],
    grammar: RowMask | None = None,
) -> torch.Tensor:
    """Edit the rows of requests (parameters, prompt, answer, drafts), as a step would."""
    sampling, positions, histories = [], [], []
    for params, prompt, answer, drafts in rows:
        history = make_history(params, len(prompt))
        if history is not None:
            made = history.make_rows(np.array(prompt + answer, dtype=np.int64), drafts)
            histories += [(len(sampling) + i, row, params) for i, row in enumerate(made)]
        for depth in range(len(drafts) + 1):
            sampling.append(RowSampling(params, 0, len(prompt)))
            positions.append(len(prompt) + len(answer) + depth)
    metadata = SamplingMetadata.build(sampling, VOCAB, CPU)
    edited = logits.clone()
    sample(edited, metadata, np.array(positions), StepEdits.build(histories, grammar, CPU))
    return edited


@pytest.mark.parametrize("seed", range(20))
def test_every_edit_at_once_against_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randrange(1, 8)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        answer = [rng.randrange(8) for _ in range(rng.randrange(12))]
        drafts = [rng.randrange(8) for _ in range(rng.randrange(4))]
        rows.append((random_params(rng), prompt, answer, drafts))
    flat = [
        (params, prompt, answer + drafts[:depth])
        for params, prompt, answer, drafts in rows
        for depth in range(len(drafts) + 1)
    ]
    logits = torch.randn(len(flat), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    edited = edit(logits, rows).numpy()
    for row, (params, prompt, answer) in enumerate(flat):
        expected = oracle(logits[row].numpy(), params, prompt, answer)
        if np.isneginf(expected).all():
            continue  # contradictory rules: see below
        np.testing.assert_allclose(edited[row], expected, rtol=2e-5, atol=2e-5)


def pack(allowed: Sequence[set[int]]) -> np.ndarray:
    bits = np.zeros((len(allowed), -(-VOCAB // 32) * 32), dtype=np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_a_grammar_leaves_only_what_it_allows() -> None:
    allowed = [{0, 31, 32, 74}, {5}]
    mask = RowMask.from_bits(np.array([0, 2]), pack(allowed), VOCAB, CPU)
    plain = (SamplingParams(temperature=0.0), [1], [2], [])
    logits = torch.randn(3, VOCAB)
    edited = edit(logits, [plain] * 3, mask)
    assert set(torch.isfinite(edited[0]).nonzero()[:, 0].tolist()) == allowed[0]
    assert torch.equal(edited[1], logits[1])
    assert edited[2].argmax() == 5


def test_the_grammar_wins_where_rules_leave_nothing() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=[4])
    mask = RowMask.from_bits(np.array([0]), pack([{4}]), VOCAB, CPU)
    assert edit(torch.randn(1, VOCAB), [(params, [1], [], [])], mask).argmax() == 4
    only = SamplingParams(temperature=0.0, allowed_token_ids=[3, 6], bad_words_token_ids=[[3], [6]])
    assert int(edit(torch.randn(1, VOCAB), [(only, [1], [], [])]).argmax()) in (3, 6)


def test_a_spent_budget_forces_the_end_token_by_token() -> None:
    params = SamplingParams(
        temperature=0.0,
        thinking_token_budget=2,
        reasoning=ReasoningSpan(END, forced_token_ids=[3, *END]),
        allowed_token_ids=[20],
    )
    # The rows behind 11 (free), 12 (spent), 3, 7 and 9 (ended).
    rows = edit(torch.randn(6, VOCAB), [(params, [1], [11], [12, 3, 7, 9, 11])])
    assert rows.argmax(-1).tolist() == [20, 3, 7, 9, 20, 20]


def test_log_probabilities_are_those_of_the_untouched_model() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={9: 100.0})
    logits = torch.randn(1, VOCAB)
    expected = logits.log_softmax(-1)
    metadata = SamplingMetadata.build([RowSampling(params, 0, 1)], VOCAB, CPU)
    output = sample(logits.clone(), metadata, np.array([1]))
    assert output.token_ids.tolist() == [9]
    assert output.logprobs is not None
    assert output.logprobs.logprobs[0, 0] == pytest.approx(float(expected[0, 9]))
    assert output.logprobs.logprob_token_ids[0, 1] == int(logits.argmax())


def test_edited_rows_are_drawn_from_the_edited_distribution() -> None:
    params = SamplingParams(
        temperature=0.7,
        logit_bias={3: 1.5, 9: -2.0},
        presence_penalty=0.8,
        repetition_penalty=1.3,
        allowed_token_ids=list(range(12)),
    )
    prompt, answer, num_draws = [1, 2, 2], [3, 4, 4], 20_000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    history = make_history(params, len(prompt))
    assert history is not None
    (row,) = history.make_rows(np.array(prompt + answer, dtype=np.int64), [])
    sampling = [RowSampling(params, 17, len(prompt))] * num_draws
    drawn = sample(
        logits.repeat(num_draws, 1),
        SamplingMetadata.build(sampling, VOCAB, CPU),
        np.arange(num_draws),
        StepEdits.build([(i, row, params) for i in range(num_draws)], None, CPU),
    ).token_ids
    edited = oracle(logits[0].numpy(), params, prompt, answer)[:12] / params.temperature
    expected = np.exp(edited - edited.max())
    expected *= num_draws / expected.sum()
    counts = np.bincount(drawn, minlength=12)
    assert len(counts) == 12
    # 31.3 is the 99.9% quantile of chi-square with 11 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 31.3
