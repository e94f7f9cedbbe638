"""Prompts from files, good ones and bad ones."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from vllm.benchmarks.datasets.build import make_prompts
from vllm.benchmarks.datasets.timed_trace import read_timed_trace
from vllm.benchmarks.datasets.words import PlainWords
from vllm.benchmarks.flags import add_dataset_flags
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser

WORDS = PlainWords()


def _args(*flags: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    add_dataset_flags(parser)
    return parser.parse_args(flags)


def _write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def test_sharegpt_takes_first_questions_and_their_answers_lengths(tmp_path: Path) -> None:
    good = {"conversations": [{"value": "a b c d e"}, {"value": "f g h i j k"}]}
    short = {"conversations": [{"value": "a"}, {"value": "b"}]}
    path = tmp_path / "s.json"
    path.write_text(json.dumps([good, short, {"conversations": []}, 7]))
    made = make_prompts(_args("--dataset-name", "sharegpt", "--dataset-path", str(path)), WORDS)
    assert [(r.prompt, r.num_output_tokens) for r in made] == [("a b c d e", 6)]


def test_custom_lines_may_say_length_turn_and_messages(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "c.jsonl",
        {"prompt": "one two", "output_tokens": 3, "turn": 1},
        {"messages": [{"role": "user", "content": "three"}]},
    )
    flags = ("--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle")
    made = make_prompts(_args(*flags, "--custom-output-len", "9"), WORDS)
    assert [(r.prompt, r.num_output_tokens, r.turn) for r in made] == [
        ("one two", 3, 1),
        ("three", 9, None),
    ]
    assert made[1].messages == ({"role": "user", "content": "three"},)


def test_ids_of_blocks_are_made_ids_of_prefixes(tmp_path: Path) -> None:
    """A document behind another one is another prefix; ids of whole prefixes stay as they are."""
    plain = [[1, 2, 3], [1, 2, 4], [1, 5]]
    shuffled = [[9, 2, 3], [9, 2, 3], [2], [1, 1]]
    lines = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for ids in plain + shuffled
    ]
    read = [r.span_ids for r in read_timed_trace(_write(tmp_path / "t.jsonl", *lines))]
    assert read[:3] == [(1, 2, 3), (1, 2, 4), (1, 5)]
    first, again, alone, twice = read[3:]
    assert first == again
    # Of the ids above only these are at places of their own.
    assert (first[0], twice[0]) == (9, 1)
    named = {*first[1:], *alone, twice[1]}
    assert len(named) == 4
    assert min(named) > 1 << 64


GOOD = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
BAD = (
    "{oops",
    "[1]",
    {"timestamp": 0},
    {**GOOD, "hash_ids": [1]},
    {**GOOD, "hash_ids": "12"},
    {**GOOD, "input_length": "x"},
    {**GOOD, "timestamp": "x"},
    {**GOOD, "timestamp": float("nan")},
    {**GOOD, "timestamp": 10**400},
    "[" * 100_000,
)


def test_bad_lines_of_a_trace_are_counted_and_the_first_three_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path / "t.jsonl", GOOD, *BAD, "", GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors begin a file
    trace = read_timed_trace(path)
    assert [r.arrival_s for r in trace] == [1.5, 1.5]
    assert f"{len(BAD)} lines were skipped" in caplog.text
    assert all(f"line {n} of" in caplog.text for n in (2, 3, 4))
    assert "line 5 of" not in caplog.text


@pytest.mark.parametrize("line", BAD)
def test_strict_refuses_the_first_bad_line(tmp_path: Path, line: Any) -> None:
    path = _write(tmp_path / "t.jsonl", GOOD, line)
    flags = ("--dataset-name", "timed_trace", "--dataset-path", str(path), "--strict")
    with pytest.raises(ConfigError, match="line 2 of"):
        make_prompts(_args(*flags), WORDS)


def test_equal_ids_are_equal_text(tmp_path: Path) -> None:
    other = {**GOOD, "hash_ids": [1, 3], "timestamp": 2000}
    path = _write(tmp_path / "t.jsonl", GOOD, other)
    flags = ("--dataset-name", "timed_trace", "--dataset-path", str(path))
    first, second = (r.prompt.split() for r in make_prompts(_args(*flags), WORDS))
    assert (len(first), len(second)) == (700, 700)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


@pytest.mark.parametrize("name", ["sharegpt", "custom", "timed_trace"])
def test_a_file_is_needed_and_must_be_readable(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset-path"):
        make_prompts(_args("--dataset-name", name), WORDS)
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="none"):
        make_prompts(_args("--dataset-name", name, "--dataset-path", missing), WORDS)
