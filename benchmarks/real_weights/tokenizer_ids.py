"""Token ids of odd texts, beside those of the releases' own settings.

The vocabulary and the merges are a file's, read by the ``gguf`` package. How text is cut before it
is merged stands here as the releases' tokenizer.json files say it, for the library ``tokenizers``;
what SentencePiece does is written out, step by step, for the models that were made with it.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import tokenizers

from benchmarks.real_weights.checks import Report
from benchmarks.real_weights.llama_cpp import odd_text
from vllm.tokenizers import Tokenizer

_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, uses_regex: bool) -> dict[str, Any]:
    flags = {"add_prefix_space": False, "trim_offsets": uses_regex, "use_regex": uses_regex}
    return {"type": "ByteLevel", **flags}


# By ``tokenizer.ggml.pre``: the normaliser, and what cuts.
_RELEASES: Mapping[str, tuple[dict[str, Any] | None, list[dict[str, Any]]]] = MappingProxyType(
    {
        "smollm": (
            None,
            [{"type": "Digits", "individual_digits": True}, _byte_level(uses_regex=True)],
        ),
        "qwen2": (
            {"type": "NFC"},
            [
                {
                    "type": "Split",
                    "pattern": {"Regex": _QWEN},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(uses_regex=False),
            ],
        ),
    }
)
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_NEVER_MERGED = (_CONTROL, _USER_DEFINED, _BYTE)
_NEVER = float("-inf")
_SPACE = "\u2581"
_MOST_SHOWN = 5


def check_tokenizer_ids(path: Path, num_texts: int, seed: int) -> Report:
    """Compare the ids of odd texts."""
    own, expected = Tokenizer.from_folder(path), read_oracle(path)
    report = Report({"texts": num_texts, "equal": 0})
    for number in range(num_texts):
        text = odd_text(random.Random(f"{seed} {number}"))
        ids, right = own.encode(text, add_special_tokens=False), expected(text)
        report.figures["equal"] += ids == right
        if ids != right and len(report.faults) < _MOST_SHOWN:
            report.faults.append(f"{text!r}: {ids}, and by the release {right}")
    return report


def read_oracle(path: Path) -> Callable[[str], list[int]]:
    """Return what turns texts into ids, without special tokens.

    Raises:
        ValueError: Of which release a file's settings are is not known here.
    """
    fields = gguf.GGUFReader(path).fields
    keys = {
        name: fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("model", "pre", "tokens", "token_type", "merges", "scores")
        if f"tokenizer.ggml.{name}" in fields
    }
    if keys["model"] == "llama":
        return SentencePiece(keys["tokens"], keys["token_type"], keys["scores"]).encode
    if keys["model"] != "gpt2" or keys["pre"] not in _RELEASES:
        raise ValueError(f"no release is known for {keys['model']!r}, {keys['pre']!r}")
    normalizer, steps = _RELEASES[keys["pre"]]
    ids = {token: number for number, token in enumerate(keys["tokens"])}
    model = {"type": "BPE", "vocab": ids, "merges": keys["merges"]}
    made = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "model": model}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    backend = tokenizers.Tokenizer.from_str(json.dumps(made))
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


class SentencePiece:
    """Merges, again and again, the two neighbours that make the token of the highest score."""

    def __init__(self, tokens: list[str], types: list[int], scores: list[float]) -> None:
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._types, self._scores = types, scores
        whole = [
            token
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        alternatives = "|".join(re.escape(token) for token in sorted(whole, key=len, reverse=True))
        self._whole = re.compile(f"({alternatives})" if whole else "(?!)")
        self._kept = frozenset(whole)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for part in self._whole.split(text):
            ids += [self._ids[part]] if part in self._kept else self._merge(part)
        return ids

    def _merge(self, text: str) -> list[int]:
        parts = list(text.replace(" ", _SPACE))
        # Of each part and the next one; the last has none.
        scores = [self._score(*pair) for pair in pairwise(parts)]
        while scores and (best := max(scores)) > _NEVER:
            at = scores.index(best)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
            del scores[at]
            for left in (at - 1, at):
                if 0 <= left < len(scores):
                    scores[left] = self._score(parts[left], parts[left + 1])
        return [number for part in parts for number in self._spell(part)]

    def _score(self, left: str, right: str) -> float:
        number = self._ids.get(left + right)
        is_plain = number is not None and self._types[number] not in _NEVER_MERGED
        return self._scores[number] if number is not None and is_plain else _NEVER

    def _spell(self, part: str) -> list[int]:
        if part in self._ids:
            return [self._ids[part]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]
