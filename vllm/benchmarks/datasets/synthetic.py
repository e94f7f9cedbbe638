"""Prompts made up from a seed: random ones, shared prefixes, and prompts that come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import Words
from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError

_RANDOM, _PREFIXES, _REPEAT = 1, 2, 3


def _make(
    words: Words, ids: Sequence[int], num_output: int, turn: int | None = None
) -> BenchRequest:
    return BenchRequest(words.text(ids), len(ids) + words.num_special, num_output, turn)


def _room(words: Words, num_tokens: int, flag: str) -> int:
    """Return how many words leave room for what the server puts around them."""
    if num_tokens <= words.num_special:
        raise ConfigError(
            f"{flag} {num_tokens} is too short: give {words.num_special + 1} or more."
        )
    return num_tokens - words.num_special


def random_prompts(
    words: Words,
    num_prompts: int,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    prefix_len: int,
    range_ratio: float,
) -> list[BenchRequest]:
    """Make unrelated prompts.

    Args:
        words: Where text comes from.
        num_prompts: How many.
        seed: Of all draws.
        input_len: Tokens of a prompt besides the prefix.
        output_len: Tokens of an answer.
        prefix_len: Tokens that all begin with.
        range_ratio: Lengths are drawn from [(1 - r) length, (1 + r) length].

    Raises:
        ConfigError: The ratio is not in [0, 1), or no room is left for words.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {range_ratio} must be at least 0 and below 1.")
    draws = Draws(seed, _RANDOM)
    prefix = words.draw(draws, prefix_len)
    room = _room(words, input_len + prefix_len, "--random-input-len") - prefix_len
    made = []
    for _ in range(num_prompts):
        own = _vary(draws, room, range_ratio)
        num_output = _vary(draws, output_len, range_ratio)
        made.append(_make(words, prefix + words.draw(draws, own), num_output))
    return made


def _vary(draws: Draws, length: int, ratio: float) -> int:
    return max(1, draws.between(int(length * (1 - ratio)), int(length * (1 + ratio))))


def prefix_repetition(
    words: Words,
    num_prompts: int,
    seed: int,
    *,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[BenchRequest]:
    """Make prompts of a few beginnings with ends of their own, in a shuffled order.

    A prompt's turn is how often its beginning was sent before.

    Raises:
        ConfigError: There are more beginnings than prompts, or no room is left for words.
    """
    if not 0 < num_prefixes <= num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes {num_prefixes} must be at least 1 and at most "
            f"--num-prompts, {num_prompts}."
        )
    draws = Draws(seed, _PREFIXES)
    room = _room(words, prefix_len, "--prefix-repetition-prefix-len")
    prefixes = [words.draw(draws, room) for _ in range(num_prefixes)]
    seen = [0] * num_prefixes
    made = []
    for number in draws.shuffled([i % num_prefixes for i in range(num_prompts)]):
        ids = prefixes[number] + words.draw(draws, suffix_len)
        made.append(_make(words, ids, output_len, seen[number]))
        seen[number] += 1
    return made


class Reading(StrEnum):
    """What "a repeat rate of 0.9" means.

    (a) beginning   all prompts share one beginning       [=========|own]   share of each
    (b) whole       a request repeats an earlier prompt   [============]    rate of requests
    (c) rounds      a pool of prompts comes back          [=========|new]   share of each, every
                    round, each with a new end                              round
    """

    BEGINNING = "beginning"
    WHOLE = "whole"
    ROUNDS = "rounds"


@dataclass(frozen=True, slots=True)
class RepeatShape:
    """Prompts that come back.

    Attributes:
        reading: What comes back.
        input_len: Tokens of a prompt.
        output_len: Tokens of an answer.
        share: (a), (c): the share of a prompt that comes back.
        rate: (b): the share of the requests that repeat an earlier prompt.
        pool: (c): prompts of a round; (b): the latest different prompts, one of which comes back.
    """

    reading: Reading = Reading.ROUNDS
    input_len: int = 8192
    output_len: int = 1024
    share: float = 0.9
    rate: float = 0.9
    pool: int = 32

    def __post_init__(self) -> None:
        for name in ("share", "rate"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"--repeat-{name} {value} must be between 0 and 1.")
        if self.pool < 1:
            raise ConfigError(f"--repeat-pool {self.pool} must be at least 1.")


def repeat_ids(
    words: Words, shape: RepeatShape, num_prompts: int, seed: int
) -> list[tuple[list[int], int]]:
    """Return the words of each prompt, and the round or turn it belongs to.

    (a) Turn 0 is the first request, 1 all others. (b) A turn is how often the prompt was sent
    before. (c) A turn is the round.
    """
    draws = Draws(seed, _REPEAT)
    room = _room(words, shape.input_len, "--repeat-input-len")
    num_kept = int(room * shape.share)
    if shape.reading is Reading.BEGINNING:
        beginning = words.draw(draws, num_kept)
        return [
            (beginning + words.draw(draws, room - num_kept), min(i, 1)) for i in range(num_prompts)
        ]
    if shape.reading is Reading.ROUNDS:
        kept = [words.draw(draws, num_kept) for _ in range(min(shape.pool, num_prompts))]
        return [
            (kept[i % shape.pool] + words.draw(draws, room - num_kept), i // shape.pool)
            for i in range(num_prompts)
        ]
    made: list[tuple[list[int], int]] = []
    recent: list[list[int]] = []
    sent: dict[int, int] = {}
    for _ in range(num_prompts):
        if recent and draws.uniform() < shape.rate:
            ids = draws.choice(recent)
        else:
            ids = words.draw(draws, room)
            recent = [*recent[-shape.pool + 1 :], ids] if shape.pool > 1 else [ids]
        turn = sent.get(id(ids), 0)
        # The list object stands for the prompt: it lives as long as ``made`` does.
        sent[id(ids)] = turn + 1
        made.append((ids, turn))
    return made


def repeat_prompts(
    words: Words, shape: RepeatShape, num_prompts: int, seed: int
) -> list[BenchRequest]:
    """Make prompts that come back."""
    return [
        _make(words, ids, shape.output_len, turn)
        for ids, turn in repeat_ids(words, shape, num_prompts, seed)
    ]
