"""A request's history follows its tokens, whatever is drafted, dropped or done again."""

import random
from collections import Counter

import numpy as np
import pytest

from vllm.sampling_params import ReasoningSpan, SamplingParams
from vllm.v1.sample.history import TokenHistory, make_history


def history(num_prompt_tokens: int, **fields: object) -> TokenHistory:
    made = make_history(SamplingParams(**fields), num_prompt_tokens)  # type: ignore[arg-type]
    assert made is not None
    return made


def test_who_asks_for_nothing_has_none() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(bad_words_token_ids=[[3]], logit_bias={1: 1.0}),
        SamplingParams(thinking_token_budget=5),  # the answer does not reason
    ):
        assert make_history(params, 3) is None


@pytest.mark.parametrize("penalises_prompt", [True, False])
def test_counts_through_drafts_and_drops(penalises_prompt: bool) -> None:
    rng = random.Random(int(penalises_prompt))
    prompt = [rng.randrange(30) for _ in range(10)]
    made = history(10, presence_penalty=0.5, repetition_penalty=1.2 if penalises_prompt else 1.0)
    answer: list[int] = []
    for _ in range(200):
        if answer and rng.random() < 0.1:
            del answer[rng.randrange(len(answer)) :]  # the scheduler kept fewer
        else:
            answer += [rng.randrange(600) for _ in range(rng.randrange(4))]
        drafts = [rng.randrange(40) for _ in range(rng.randrange(4))]
        rows = made.make_rows(np.array(prompt + answer, dtype=np.int64), drafts)
        assert len(rows) == len(drafts) + 1
        for depth, row in enumerate(rows):
            assert row.seen is not None
            expected = dict.fromkeys(prompt if penalises_prompt else (), 0)
            expected |= Counter(answer + drafts[:depth])
            seen = zip(row.seen.ids.tolist(), row.seen.counts.tolist(), strict=True)
            assert dict(seen) == expected
            assert len(row.seen.ids) == len(expected)


def test_bad_words_of_several_tokens_count_in_the_answer_only() -> None:
    made = history(2, bad_words_token_ids=[[5, 6], [5, 6, 7], [8, 8]])

    def banned(answer: list[int], drafts: list[int]) -> list[list[int]]:
        tokens = np.array([5, 6, *answer], dtype=np.int64)
        return [row.banned_ids for row in made.make_rows(tokens, drafts)]

    assert banned([], [5]) == [[], [6]]
    assert banned([8, 5], [6, 9]) == [[6], [7], []]
    assert banned([8, 5, 8], []) == [[8]]


def forced(made: TokenHistory, answer: list[int], drafts: list[int]) -> list[int | None]:
    rows = made.make_rows(np.array([1, *answer], dtype=np.int64), drafts)
    return [row.forced_id for row in rows]


def test_the_budget_counts_reasoning_only() -> None:
    span = ReasoningSpan([9])
    made = history(1, thinking_token_budget=3, reasoning=span)
    assert forced(made, [4, 4], [4, 4]) == [None, 9, None]  # 4 cannot stand where 9 is forced
    assert forced(made, [4, 4, 4], [9, 4]) == [9, None, None]
    made = history(1, thinking_token_budget=3, reasoning=span)
    assert forced(made, [4, 9], [4, 4, 4]) == [None] * 4
    assert forced(history(1, thinking_token_budget=0, reasoning=span), [], [9]) == [9, None]


def test_an_answer_that_may_reason_is_free_until_it_does() -> None:
    span = ReasoningSpan([9], start_token_ids=[2])
    made = history(1, thinking_token_budget=1, reasoning=span)
    assert forced(made, [], [2, 4, 9]) == [None, None, 9, None]
    made = history(1, thinking_token_budget=1, reasoning=span)
    assert forced(made, [5], [5, 5]) == [None] * 3
