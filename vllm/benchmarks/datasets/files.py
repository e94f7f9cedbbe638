"""Prompts from files: ShareGPT conversations and lines of JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.benchmarks.datasets.lines import BadLines, read_json_lines
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.words import Words
from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError

_STREAM = 11
# Shorter prompts and answers measure the protocol, longer ones do not fit the usual context.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


def sharegpt_prompts(
    words: Words, path: Path, num_prompts: int, seed: int, output_len: int | None
) -> list[BenchRequest]:
    """Take first questions of ShareGPT conversations; answers are as long as those recorded.

    Args:
        words: Counts tokens.
        path: A JSON list of ``{"conversations": [{"value": ...}, ...]}``.
        num_prompts: At most how many.
        seed: Of the order.
        output_len: Tokens of every answer instead.

    Raises:
        ConfigError: The file is not of that form, or holds no usable conversation.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no readable JSON file: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} must hold a JSON list of conversations.")
    made: list[BenchRequest] = []
    for entry in Draws(seed, _STREAM).shuffled(entries):
        if len(made) == num_prompts:
            break
        request = _first_turns(words, entry, output_len)
        if request is not None:
            made.append(request)
    if not made:
        raise ConfigError(
            f"{path} has no conversation of two turns with {_MIN_TOKENS} to "
            f"{_MAX_PROMPT_TOKENS} prompt tokens."
        )
    return made


def _first_turns(words: Words, entry: Any, output_len: int | None) -> BenchRequest | None:
    turns = entry.get("conversations", entry.get("conversation", ())) if _is_dict(entry) else ()
    texts = [turn.get("value") for turn in turns if _is_dict(turn)]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts[:2]):
        return None
    question, answer = texts[:2]
    num_prompt = words.count(question) + words.num_special
    num_output = words.count(answer) if output_len is None else output_len
    too_short = num_prompt < _MIN_TOKENS or num_output < (_MIN_TOKENS if output_len is None else 1)
    if too_short or num_prompt > _MAX_PROMPT_TOKENS or num_prompt + num_output > _MAX_TOTAL_TOKENS:
        return None
    return BenchRequest(question, num_prompt, num_output)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def custom_prompts(
    words: Words,
    path: Path,
    num_prompts: int,
    seed: int,
    *,
    output_len: int,
    shuffle: bool,
    bad: BadLines,
) -> list[BenchRequest]:
    """Read prompts from lines of JSON.

    A line has ``prompt`` or ``messages``, and may have ``output_tokens`` (how long its answer is),
    ``turn`` (for hit rates by turn) and ``timestamp`` (ms).

    Raises:
        ConfigError: The file has no usable line.
    """

    def parse(raw: dict[str, Any]) -> BenchRequest:
        messages = raw.get("messages")
        prompt = raw["prompt"] if messages is None else _joined(messages)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError("prompt must be a text")
        num_output = raw.get("output_tokens", output_len)
        if num_output == -1 or type(num_output) is not int or num_output < 1:
            raise ValueError(
                f"output_tokens={num_output!r} is no length: give it in the line, or "
                "--custom-output-len"
            )
        turn, time_ms = raw.get("turn"), raw.get("timestamp")
        return BenchRequest(
            prompt,
            words.count(prompt) + words.num_special,
            num_output,
            turn=None if turn is None else int(turn),
            arrival_s=None if time_ms is None else float(time_ms) / 1000,
            messages=None if messages is None else tuple(messages),
        )

    made = list(read_json_lines(path, parse, bad))
    bad.report()
    if not made:
        raise bad.nothing_left()
    if any(request.arrival_s is None for request in made):
        # Times mean something only if all lines have one.
        made = [replace(request, arrival_s=None) for request in made]
        if shuffle:
            made = Draws(seed, _STREAM).shuffled(made)
    return made[:num_prompts]


def _joined(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list")
    return "\n".join(str(message["content"]) for message in messages)
