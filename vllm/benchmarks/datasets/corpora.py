"""Datasets that people publish, from local files: sonnet, BurstGPT, Spec-Bench, a hub's folder.

A hub's folder holds rows as parquet, JSON or CSV. Which column is the prompt is found from the
names that datasets for text use.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.benchmarks.datasets.lines import BadLines, read_json_lines
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import Words
from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError

_SONNET, _BURST, _SPEC, _HUB = 21, 22, 23, 24
_SONNET_TASK = "Continue this poem in the manner of its lines:\n"
_BURST_COLUMNS = ("Request tokens", "Response tokens")
# Of the columns that a row has, the first of these is its prompt.
_PROMPT_COLUMNS = (
    *("prompt", "question", "instruction", "turns", "messages", "conversations", "conversation"),
    *("problem", "query", "input", "article", "document", "text"),
)
_USER_ROLES = ("user", "human")


def sonnet_prompts(
    words: Words,
    path: Path,
    num_prompts: int,
    seed: int,
    *,
    input_len: int,
    output_len: int,
    prefix_len: int,
) -> list[BenchRequest]:
    """Make prompts of a text's lines: the same first ones, then others in an order of their own.

    Args:
        words: Counts tokens.
        path: A text; ``sonnet.txt`` gave the dataset its name.
        num_prompts: How many.
        seed: Of the lines' order.
        input_len: Tokens of a prompt, met to within half a line.
        output_len: Tokens of an answer.
        prefix_len: Tokens that all prompts share.

    Raises:
        ConfigError: The file is no text, or the lengths leave no room for a line.
    """
    lines = [f"{line}\n" for line in _read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} has no line of text.")
    base = words.count(_SONNET_TASK) + words.num_special
    mean = sum(map(words.count, lines)) / len(lines)
    num_shared = round(max(0, prefix_len - base) / mean)
    num_own = round((input_len - base) / mean) - num_shared
    if not base <= prefix_len < input_len or num_own < 1:
        raise ConfigError(
            f"--sonnet-prefix-len {prefix_len} must be at least {base}, and --sonnet-input-len "
            f"{input_len} greater by a line, about {round(mean)} tokens."
        )
    shared = [lines[i % len(lines)] for i in range(num_shared)]
    draws = Draws(seed, _SONNET)
    made = []
    for _ in range(num_prompts):
        own = [draws.choice(lines) for _ in range(num_own)]
        made.append(_request(words, _SONNET_TASK + "".join(shared + own), output_len))
    return made


def burstgpt_prompts(words: Words, path: Path, num_prompts: int, seed: int) -> list[BenchRequest]:
    """Make up unrelated prompts with the lengths of a BurstGPT log, drawn from its answered rows.

    Raises:
        ConfigError: The file is no CSV with the log's columns, or has no answered row.
    """
    with _open(path) as file:
        reader = csv.DictReader(file)
        missing = set(_BURST_COLUMNS) - set(reader.fieldnames or ())
        if missing:
            raise ConfigError(
                f"{path} is no BurstGPT log: it has no column {', '.join(sorted(missing))}."
            )
        lengths = [pair for row in reader if (pair := _lengths(row)) is not None]
    if not lengths:
        raise ConfigError(f"{path} has no row with request and response tokens above 0.")
    draws = Draws(seed, _BURST)
    chosen = draws.shuffled(lengths)
    while len(chosen) < num_prompts:
        chosen += draws.shuffled(lengths)
    made = []
    for num_prompt, num_output in chosen[:num_prompts]:
        ids = words.draw(draws, max(1, num_prompt - words.num_special))
        made.append(_request(words, words.text(ids), num_output))
    return made


def _lengths(row: Mapping[str, str]) -> tuple[int, int] | None:
    """Return prompt and answer tokens of a row; None: failed requests have an answer of 0."""
    try:
        num_prompt, num_output = (int(float(row[name])) for name in _BURST_COLUMNS)
    except (TypeError, ValueError):
        return None
    return (num_prompt, num_output) if num_prompt > 0 and num_output > 0 else None


def spec_bench_prompts(
    words: Words,
    path: Path,
    num_prompts: int,
    seed: int,
    *,
    output_len: int,
    category: str | None,
    shuffle: bool,
    bad: BadLines,
) -> list[BenchRequest]:
    """Take the first questions of Spec-Bench's lines: ``{"category": ..., "turns": [...]}``.

    Raises:
        ConfigError: No line is usable, or none is of the category.
    """
    categories: set[str] = set()

    def parse(raw: dict[str, Any]) -> BenchRequest | None:
        name, turns = str(raw.get("category", "")), raw["turns"]
        categories.add(name)
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError("turns must be a list of texts")
        if category is not None and name != category:
            return None
        return _request(words, turns[0], output_len)

    made = [request for request in read_json_lines(path, parse, bad) if request is not None]
    bad.report()
    if not made:
        if category is not None and categories:
            known = ", ".join(sorted(categories))
            raise ConfigError(
                f"{path} has no question of the category {category!r}; it has: {known}."
            )
        raise bad.nothing_left()
    return (Draws(seed, _SPEC).shuffled(made) if shuffle else made)[:num_prompts]


def hub_prompts(
    words: Words,
    folder: Path,
    num_prompts: int,
    seed: int,
    *,
    split: str,
    subset: str | None,
    output_len: int,
    shuffle: bool,
    bad: BadLines,
) -> list[BenchRequest]:
    """Take prompts from a local copy of a hub's dataset.

    Args:
        words: Counts tokens.
        folder: Holds files of rows, itself or in folders; ``*.parquet``, ``*.jsonl``, ``*.json``
            (a list) or ``*.csv``.
        num_prompts: At most how many.
        seed: Of the order.
        split: Part of the names of the files to read, if any file's name has it.
        subset: Folder, or part of the files' names, likewise.
        output_len: Tokens of every answer.
        shuffle: Whether to take rows in another order than the files'.
        bad: Takes rows without a prompt.

    Raises:
        ConfigError: No file or no row is usable, or parquet files need a package that is not there.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--dataset-path {folder} is no folder. Datasets are read from local copies: "
            "`hf download --repo-type dataset NAME --local-dir FOLDER` makes one."
        )
    made: list[BenchRequest] = []
    for path in _find_row_files(folder, split, subset):
        for number, row in enumerate(_READERS[path.suffix](path), 1):
            try:
                made.append(_row_request(words, row, output_len))
            except (KeyError, TypeError, ValueError) as error:
                bad.add(number, f"{error} ({path.name})")
            if not shuffle and len(made) == num_prompts:
                return made
    bad.report()
    if not made:
        raise ConfigError(
            f"{folder} has no row with a prompt: looked for the columns "
            f"{', '.join(_PROMPT_COLUMNS)}. " + "; ".join(bad.shown)
        )
    return (Draws(seed, _HUB).shuffled(made) if shuffle else made)[:num_prompts]


def _find_row_files(folder: Path, split: str, subset: str | None) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _READERS and path.is_file())
    if not files:
        raise ConfigError(f"{folder} has no file of rows: {', '.join(sorted(_READERS))}.")
    if subset is not None:
        chosen = [path for path in files if subset in str(path.relative_to(folder))]
        if not chosen:
            names = ", ".join(str(path.relative_to(folder)) for path in files[:8])
            raise ConfigError(f"--hf-subset {subset!r} names no file of {folder}: {names}.")
        files = chosen
    named = [path for path in files if split in path.name]
    # Files that name no split at all are all of the dataset.
    marked = [path for path in files if any(s in path.name for s in ("train", "test", "valid"))]
    if not named and marked:
        names = ", ".join(path.name for path in marked[:8])
        raise ConfigError(f"--hf-split {split!r} names no file of {folder}: {names}.")
    return named or files


def _row_request(words: Words, row: Any, output_len: int) -> BenchRequest:
    if not isinstance(row, Mapping):
        raise TypeError("a row must be an object")
    name = next((name for name in _PROMPT_COLUMNS if row.get(name)), None)
    if name is None:
        raise ValueError("no column is a prompt")
    value = row[name]
    if isinstance(value, str):
        more = row.get("input") if name == "instruction" else None
        return _request(words, f"{value}\n{more}" if more else value, output_len)
    first = value[0]
    if isinstance(first, str):
        return _request(words, first, output_len)
    # Conversations: OpenAI's words for a message, or ShareGPT's.
    for message in value:
        if not isinstance(message, Mapping):
            raise TypeError(f"{name} is no list of texts or messages")
        role = message.get("role", message.get("from"))
        text = message.get("content", message.get("value"))
        if role in _USER_ROLES and isinstance(text, str) and text:
            return _request(words, text, output_len)
    raise ValueError(f"{name} has no message of a user")


def _read_json(path: Path) -> Iterable[Any]:
    try:
        rows = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON file: {error}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must hold a JSON list of rows.")
    return rows


def _read_jsonl(path: Path) -> Iterator[Any]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"line {number} of {path} is no JSON: {error}") from error


def _read_csv(path: Path) -> Iterator[Any]:
    with _open(path) as file:
        yield from csv.DictReader(file)


def _read_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowInvalid  # noqa: PLC0415  (an extra)
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"{path} needs pyarrow: install vllm[bench], or give a folder of JSON lines."
        ) from error
    try:
        for batch in ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ConfigError(f"{path} is no parquet file: {error}") from error


_READERS: Mapping[str, Callable[[Path], Iterable[Any]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _request(words: Words, prompt: str, num_output: int) -> BenchRequest:
    return BenchRequest(prompt, words.count(prompt) + words.num_special, num_output)


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", errors="replace", newline="")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _read_text(path: Path) -> str:
    with _open(path) as file:
        return str(file.read())
