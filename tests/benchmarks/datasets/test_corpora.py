"""Datasets that people publish: their files' forms, and what is no such file."""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from vllm.benchmarks.datasets.build import make_prompts
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import PlainWords
from vllm.benchmarks.flags import add_dataset_flags
from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser

WORDS = PlainWords()
ROWS: list[dict[str, Any]] = [{"question": "q one"}, {"question": "q two"}]


def make(name: str, path: Path, *flags: str) -> list[BenchRequest]:
    parser = FlexibleArgumentParser()
    add_dataset_flags(parser)
    given = ("--dataset-name", name, "--dataset-path", str(path), *flags)
    args: argparse.Namespace = parser.parse_args(given)
    return make_prompts(args, WORDS)


def test_sonnet_prompts_share_their_first_lines(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("".join(f"line {i} of a poem\n\n" for i in range(40)))
    flags = ("--sonnet-input-len", "100", "--sonnet-prefix-len", "50", "--sonnet-output-len", "7")
    made = make("sonnet", path, *flags, "--num-prompts", "6")
    assert {r.num_output_tokens for r in made} == {7}
    assert all(abs(r.num_prompt_tokens - 100) <= 5 for r in made)
    first, last = min(prompts := [r.prompt for r in made]), max(prompts)
    shared = first[: next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)]
    assert WORDS.count(shared) == pytest.approx(50, abs=5)
    assert "line 0 of a poem\nline 1 of" in shared
    assert len({r.prompt for r in made}) == 6
    assert made == make("sonnet", path, *flags, "--num-prompts", "6")


def test_sonnet_lengths_that_leave_no_room(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("one two three\n")
    for lengths in (("20", "20"), ("20", "3"), ("10", "9")):
        with pytest.raises(ConfigError, match="--sonnet-prefix-len"):
            make(
                "sonnet", path, "--sonnet-input-len", lengths[0], "--sonnet-prefix-len", lengths[1]
            )
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="no line of text"):
        make("sonnet", path)


def test_burstgpt_has_the_logs_lengths_of_answered_requests(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,30,0,30,Conversation log\n"
    path.write_text(f"{head}{rows}118,GPT-4,1087,230,1317,API log\n,,,,,\n")
    made = make("burstgpt", path, "--num-prompts", "5")
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in made} == {(472, 18), (1087, 230)}
    assert len(made) == 5
    assert len({r.prompt for r in made}) == 5
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no column Request tokens, Response tokens"):
        make("burstgpt", path)
    path.write_text(head)
    with pytest.raises(ConfigError, match="no row"):
        make("burstgpt", path)


def test_spec_bench_takes_first_turns_of_a_category(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 1, "category": "math", "turns": ["what is one and one", "and more"]},
        {"question_id": 2, "category": "qa", "turns": ["who wrote it"]},
        {"question_id": 3, "category": "qa", "turns": "no list"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = make("spec_bench", path, "--spec-bench-output-len", "9", "--disable-shuffle")
    assert [(r.prompt, r.num_output_tokens) for r in made] == [
        ("what is one and one", 9),
        ("who wrote it", 9),
    ]
    assert [r.prompt for r in make("spec_bench", path, "--spec-bench-category", "math")] == [
        "what is one and one"
    ]
    with pytest.raises(ConfigError, match="'cooking'; it has: math, qa"):
        make("spec_bench", path, "--spec-bench-category", "cooking")
    with pytest.raises(ConfigError, match="turns must be a list"):
        make("spec_bench", path, "--strict")


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        names = list(rows[0])
        lines = [",".join(names), *(",".join(row[n] for n in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(rows))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json", ".csv"])
def test_a_hubs_folder_in_every_form(tmp_path: Path, suffix: str) -> None:
    _write(tmp_path, f"data/train-00000-of-00001{suffix}", ROWS)
    _write(tmp_path, f"data/test-00000-of-00001{suffix}", [{"question": "q of the test"}])
    made = make("hf", tmp_path, "--disable-shuffle", "--hf-output-len", "5")
    assert [(r.prompt, r.num_output_tokens) for r in made] == [("q one", 5), ("q two", 5)]
    assert [r.prompt for r in make("hf", tmp_path, "--hf-split", "test")] == ["q of the test"]
    with pytest.raises(ConfigError, match="--hf-split 'dev' names no file"):
        make("hf", tmp_path, "--hf-split", "dev")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a b", "text": "no"}, "a b"),
        ({"instruction": "do it", "input": "to this"}, "do it\nto this"),
        ({"turns": ["first", "second"]}, "first"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "h"),
        ({"text": "plain"}, "plain"),
    ],
)
def test_the_prompt_of_a_row(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    _write(tmp_path, "rows.jsonl", [row])
    assert [r.prompt for r in make("hf", tmp_path)] == [prompt]


def test_a_hubs_folder_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        make("hf", tmp_path / "lmarena-ai" / "chats")
    with pytest.raises(ConfigError, match="no file of rows"):
        make("hf", tmp_path)
    _write(
        tmp_path, "en/rows.jsonl", [{"image": 7}, {"prompt": [7]}, {"messages": [{"role": "x"}]}]
    )
    with pytest.raises(ConfigError, match="no row with a prompt"):
        make("hf", tmp_path)
    with pytest.raises(ConfigError, match="--hf-subset 'fr' names no file"):
        make("hf", tmp_path, "--hf-subset", "fr")
    (tmp_path / "en" / "bad.parquet").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"bad\.parquet is no parquet file"):
        make("hf", tmp_path)


def test_parquet_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, "rows.parquet", ROWS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"install vllm\[bench\]"):
        make("hf", tmp_path)
