"""Made-up prompts have the shapes that their flags say, and are those of the seed."""

import subprocess
import sys

import pytest

from vllm.benchmarks.datasets.synthetic import (
    Reading,
    RepeatShape,
    prefix_repetition,
    random_prompts,
    repeat_ids,
)
from vllm.benchmarks.datasets.words import PlainWords, load_words
from vllm.exceptions import ConfigError

WORDS = PlainWords()


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def test_a_text_has_as_many_tokens_as_were_asked_for() -> None:
    words = load_words("deepseek-v4")
    made = random_prompts(words, 3, 0, input_len=500, output_len=7, prefix_len=20, range_ratio=0.0)
    assert [words.count(r.prompt) + words.num_special for r in made] == [520] * 3
    assert len({r.prompt for r in made}) == 3
    assert len({r.prompt.split()[19] for r in made}) == 1


def test_lengths_vary_within_the_ratio() -> None:
    made = random_prompts(
        WORDS, 200, 0, input_len=100, output_len=10, prefix_len=0, range_ratio=0.3
    )
    lengths = [r.num_prompt_tokens for r in made]
    assert (min(lengths), max(lengths)) == (70, 130)
    assert {r.num_output_tokens for r in made} == set(range(7, 14))


def test_prefixes_come_equally_often_and_count_their_turns() -> None:
    made = prefix_repetition(WORDS, 12, 0, num_prefixes=3, prefix_len=8, suffix_len=4, output_len=5)
    heads = [" ".join(r.prompt.split()[:8]) for r in made]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    for i, head in enumerate(heads):
        assert made[i].turn == heads[:i].count(head)


def test_reading_beginning_shares_it_among_all() -> None:
    shape = RepeatShape(Reading.BEGINNING, input_len=100, share=0.9)
    made = repeat_ids(WORDS, shape, 6, 0)
    assert [turn for _, turn in made] == [0, 1, 1, 1, 1, 1]
    assert all(_common(made[0][0], ids) == 90 for ids, _ in made[1:])


def test_reading_rounds_brings_each_prompt_back_with_another_end() -> None:
    shape = RepeatShape(Reading.ROUNDS, input_len=100, share=0.9, pool=4)
    made = repeat_ids(WORDS, shape, 12, 0)
    assert [turn for _, turn in made] == [0] * 4 + [1] * 4 + [2] * 4
    for i in range(4):
        assert _common(made[i][0], made[i + 4][0]) == 90
        assert _common(made[i][0], made[(i + 1) % 4][0]) < 3


def test_reading_whole_repeats_that_share_of_the_requests() -> None:
    shape = RepeatShape(Reading.WHOLE, input_len=20, rate=0.9, pool=8)
    made = repeat_ids(WORDS, shape, 1000, 0)
    seen: list[list[int]] = []
    for ids, turn in made:
        assert turn == seen.count(ids)
        seen.append(ids)
    assert sum(turn > 0 for _, turn in made) == pytest.approx(900, abs=30)


@pytest.mark.parametrize("values", [{"share": 1.5}, {"rate": -0.1}, {"pool": 0}])
def test_senseless_shapes_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="repeat"):
        RepeatShape(**values)  # type: ignore[arg-type]


# Of the prompts below: a change makes results before and after incomparable.
DIGEST = "4679b0d72360350d1741d941003080fcd871048027c14f5bc9d6fdf015a45196"

_PRINT = """
import hashlib
from vllm.benchmarks.datasets.synthetic import *
from vllm.benchmarks.datasets.timed_trace import TimedRequest, trace_prompts
from vllm.benchmarks.datasets.words import PlainWords
words = PlainWords()
made = repeat_prompts(words, RepeatShape(input_len=64, output_len=1), 40, 5)
made += trace_prompts(words, [TimedRequest(0.0, 1000, 3, (7, 9))], 5, 512)
print(hashlib.sha256("".join(r.prompt for r in made).encode()).hexdigest())
"""


@pytest.mark.slow
def test_prompts_are_the_same_in_every_process() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert digests == {DIGEST}
