"""Log probabilities of prompts: what is told is what every row would say, whatever was known."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.utils.hashing import BlockHash
from vllm.v1.core.prompt_scores import PromptScores, ScoreRows

UNIT = 4


def make_request(name: str, prompt: list[int], num_scores: int = 1) -> Any:
    hashes = [BlockHash(bytes(prompt[: end + UNIT])) for end in range(0, len(prompt), UNIT)]
    return SimpleNamespace(
        request_id=name,
        prompt=prompt,
        num_prompt_tokens=len(prompt),
        num_tokens=len(prompt),
        num_scores=num_scores,
        block_hashes=hashes[: len(prompt) // UNIT],
        is_finished=lambda: False,
        leaves_all=True,
    )


def rows_of(request: Any, begin: int, end: int) -> ScoreRows:
    """Row p says all that it depends on: the prompt's tokens up to the one that it predicts."""
    said = [hash(tuple(request.prompt[: p + 2])) % (1 << 20) for p in range(begin, end)]
    ids = np.array(said, np.int64).reshape(-1, 1) + np.arange(request.num_scores + 1)
    return ScoreRows(ids, ids.astype(np.float32), ids[:, 0])


def finish(scores: PromptScores, request: Any) -> None:
    request.is_finished = lambda: True
    scores.pause(request)


class Run:
    """A request that is computed in chunks, as a worker and a scheduler do it."""

    def __init__(self, scores: PromptScores, request: Any, rng: random.Random) -> None:
        self.scores, self.request, self.rng = scores, request, rng
        self.told: list[ScoreRows] = []
        self.num_reported = 0  # the worker's
        self.start()

    def start(self) -> None:
        limit = min(self.scores.find_limit(self.request), self.request.num_tokens - 1)
        # The cache may have less than what is known.
        self.place = self.rng.choice([limit, self.rng.randint(0, limit)]) // UNIT * UNIT
        self.scores.admit(self.request, self.place)

    @property
    def is_over(self) -> bool:
        return self.place >= self.request.num_tokens

    def step(self) -> None:
        end = min(self.place + self.rng.randint(1, 11), self.request.num_tokens)
        first = max(self.place, self.num_reported)
        last = min(end, self.request.num_prompt_tokens - 1)
        tensors = None
        if first < last:
            tensors = tuple(rows_of(self.request, first, last))
            self.num_reported = last
        told = self.scores.add(self.request, tensors)
        self.told += [] if told is None else [told]
        self.place = end

    def preempt(self) -> None:
        self.scores.pause(self.request)
        self.start()

    def check(self) -> None:
        finish(self.scores, self.request)
        wanted = rows_of(self.request, 0, self.request.num_prompt_tokens - 1)
        if not self.told:
            assert not len(wanted.ranks)
            return
        told = ScoreRows.joined(self.told)
        for mine, other in zip(told, wanted, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_told_is_what_every_row_says(seed):
    rng = random.Random(seed)
    scores = PromptScores(UNIT, max_bytes=rng.choice([0, 4000, 20_000, 1 << 20]))
    prompts: list[list[int]] = [[]]
    runs: list[Run] = []
    for number in range(60):
        kept = rng.choice(prompts)
        kept = kept[: rng.randint(0, len(kept))]
        prompt = kept + [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        prompts.append(prompt)
        runs.append(Run(scores, make_request(str(number), prompt, rng.choice([0, 1, 1])), rng))
        while len(runs) > 3:
            run = rng.choice(runs)
            run.step()
            if rng.random() < 0.1 and not run.is_over:
                run.preempt()
            if rng.random() < 0.01:
                scores.reset()
            if run.is_over:
                run.check()
                runs.remove(run)
    for run in runs:
        while not run.is_over:
            run.step()
        run.check()
    assert not scores._coming
    assert not scores._scored
    assert scores.num_bytes <= scores._max_bytes


def test_a_prompt_that_is_scored_again_resumes_one_unit_before_what_is_known():
    scores, rng = PromptScores(UNIT), random.Random(0)
    prompt = [1, 2, 3] * 7  # five units and a token
    run = Run(scores, make_request("a", prompt), rng)
    while not run.is_over:
        run.step()
    run.check()
    assert scores.find_limit(make_request("b", prompt)) == 5 * UNIT - 1
    other = make_request("c", [*prompt[:9], 0, *prompt[10:]])
    assert scores.find_limit(other) == 2 * UNIT - 1
    # With another number of alternatives ties might be told in another order.
    assert scores.find_limit(make_request("d", prompt, num_scores=2)) == 0
    scores.reset()
    assert scores.find_limit(make_request("e", prompt)) == 0


def test_whoever_shares_what_is_being_scored_waits_for_it_and_for_no_more():
    scores = PromptScores(UNIT)
    first = make_request("a", [0] * 16)
    scores.admit(first, 0)
    second = make_request("b", [0] * 8 + [1] * 8)
    third = make_request("c", [2] * 16)
    assert scores.is_coming(second)
    assert not scores.is_coming(third)
    assert not scores.is_coming(make_request("d", [0] * 16, num_scores=0))
    scores.add(first, tuple(rows_of(first, 0, 4)))
    assert scores.is_coming(second)
    scores.add(first, tuple(rows_of(first, 4, 9)))
    assert not scores.is_coming(second), "all that they share is known"
    # One that lost its blocks brings nothing for now.
    fourth = make_request("f", [0] * 16)
    assert scores.is_coming(fourth)
    scores.pause(first)
    assert not scores.is_coming(fourth)


def test_rows_used_longest_ago_go_first():
    one = rows_of(make_request("x", [0] * UNIT), 0, UNIT).num_bytes + 512
    scores, rng = PromptScores(UNIT, max_bytes=4 * one), random.Random(1)
    for name in "abcde":
        run = Run(scores, make_request(name, [ord(name)] * (UNIT + 1)), rng)
        while not run.is_over:
            run.step()
        run.check()
    assert scores.num_bytes <= 4 * one
    assert not scores.find_limit(make_request("f", [ord("a")] * (UNIT + 1)))
    assert scores.find_limit(make_request("g", [ord("e")] * (UNIT + 1)))


def test_a_request_that_leaves_nothing_reads_what_is_known_and_keeps_nothing() -> None:
    rng, scores = random.Random(5), PromptScores(UNIT)
    shared = [rng.randrange(9) for _ in range(40)]
    first = Run(scores, make_request("a", shared), rng)
    while not first.is_over:
        first.step()
    first.check()
    before = scores.num_bytes
    for i in range(8):
        request = make_request(f"p{i}", shared[:24] + [rng.randrange(9, 99) for _ in range(30)])
        request.leaves_all = False
        run = Run(scores, request, rng)
        other = make_request(f"o{i}", request.prompt)
        assert not scores.is_coming(other)
        while not run.is_over:
            run.step()
            if rng.random() < 0.2:
                run.preempt()
        run.check()
    assert scores.num_bytes == before
    assert scores.find_limit(make_request("z", shared)) == 39
