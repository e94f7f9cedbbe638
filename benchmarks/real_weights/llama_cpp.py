"""What llama.cpp says of the same file: token ids of odd texts, and perplexity."""

import math
import random
import re
import subprocess
import tempfile
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.llama_server import LlamaServer
from benchmarks.real_weights.checks import Report, open_engine
from benchmarks.real_weights.perplexity import read_text, score
from vllm import LLM

# llama-perplexity scores the second half of each window.
_WINDOW = 1024
# Twice this engine, and llama.cpp.
_NUM_READERS = 3
_WORDS = (
    *("the", "of", "naïve", "straße", "東京", "здравствуй", "مرحبا", "ไทย", "हिन्दी", "한국어"),
    *("don't", "I'll", "WE'RE", "x86_64", "3.14", "1e-9"),
)
_CODE = (
    "def f(x):\n\treturn x",
    "{'a': [1, 2]}",
    "\r\n",
    "\n\n\n",
    "   ",
    "\t\t",
    "//",
    "!!!",
    "->",
)
_PAIRS = (
    "\u200d",
    "\ufe0f",
    "\u0301",
    "\U0001f469\u200d\U0001f4bb",
    "\U0001f1e9\U0001f1ea",
    "\xa0",
)


def odd_text(rng: random.Random) -> str:
    """Returns a text of words, code, white space, numbers and any characters."""
    kinds = (
        lambda: rng.choice(_WORDS),
        lambda: rng.choice(_CODE),
        lambda: rng.choice(_PAIRS),
        lambda: " " * rng.randrange(1, 9),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 13))),
        lambda: _any_character(rng),
    )
    return "".join(rng.choice(kinds)() for _ in range(rng.randrange(1, 24)))


def _any_character(rng: random.Random) -> str:
    while True:
        char = chr(rng.randrange(1, rng.choice((0x80, 0x500, 0x3000, 0x11000, 0x20000))))
        if unicodedata.category(char) not in ("Cs", "Cn", "Co"):
            return char


def check_tokenizer(path: Path, programs: Path, num_texts: int, seed: int) -> Report:
    """Compare the ids of odd texts.

    Args:
        path: The model's file.
        programs: The folder of llama.cpp's programs.
        num_texts: How many.
        seed: Of the texts.
    """
    texts = [odd_text(random.Random(f"{seed} {number}")) for number in range(num_texts)]
    with open_engine(path) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        own = [tokenizer.encode(text) for text in texts]
    report = Report({"texts": num_texts, "equal": 0})
    with LlamaServer(str(programs / "llama-server"), str(path), "-c", "256") as client:
        for text, ids in zip(texts, own, strict=True):
            reply = client.post("/tokenize", json={"content": text, "add_special": True})
            reply.raise_for_status()
            is_equal = reply.json()["tokens"] == ids
            report.figures["equal"] += is_equal
            if not is_equal and len(report.faults) < 5:
                report.faults.append(f"{text!r}: {ids}, and llama.cpp {reply.json()['tokens']}")
    return report


def check_perplexity(path: Path, programs: Path, num_tokens: int, most_s: float) -> Report:
    """Compare the perplexity of the same halves of windows of the same text.

    Args:
        path: The model's file.
        programs: The folder of llama.cpp's programs.
        num_tokens: So many are scored, or the windows that hold as many.
        most_s: Seconds for the whole check: as many windows are read as then fit, at least one.
    """
    text = read_text()
    most = -(-num_tokens // (_WINDOW - _WINDOW // 2 - 1))
    losses: dict[str, list[tuple[float, int]]] = {}
    for inputs in ("exact", "int8"):
        with open_engine(path, quantized_inputs=inputs) as llm:
            windows = _cut_windows(llm, text, most)
            end = time.monotonic() + most_s / _NUM_READERS
            losses[inputs] = []
            # The second reader reads what the first did.
            for window in windows[: len(losses["exact"]) or most]:
                losses[inputs].append(score(llm, [window], _WINDOW // 2))
                if inputs == "exact" and time.monotonic() > end:
                    break
    count = len(losses["int8"])
    figures: dict[str, Any] = {"windows": count, "tokens": sum(n for _, n in losses["exact"])}
    for inputs, own in losses.items():
        figures[inputs] = math.exp(sum(loss for loss, _ in own) / sum(n for _, n in own))
    figures["llama_cpp"] = _ask_llama_cpp(path, programs, text, count)
    return Report(figures)


def _cut_windows(llm: LLM, text: str, count: int) -> Sequence[list[int]]:
    """The windows that llama.cpp cuts: each begins with the model's own first token, if any."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    first, ids = tokenizer.encode(""), tokenizer.encode(text)
    windows = [ids[at * _WINDOW : (at + 1) * _WINDOW] for at in range(count)]
    return [first + window[len(first) :] for window in windows]


def _ask_llama_cpp(path: Path, programs: Path, text: str, count: int) -> float:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [str(programs / "llama-perplexity"), "-m", str(path), "-f", file.name]
        command += ["-c", str(_WINDOW), "--chunks", str(count), "-ngl", "0"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    told = re.search(r"Final estimate: PPL = ([0-9.]+)", ran.stdout + ran.stderr)
    if told is None:
        raise RuntimeError(f"llama-perplexity told no perplexity: {ran.stderr[-500:]}")
    return float(told[1])
