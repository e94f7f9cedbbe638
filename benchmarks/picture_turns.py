"""What do pictures cost those who ask again, and those who only listen?

    python -m benchmarks.picture_turns [--rounds 8] [--flags "--async-scheduling"]

A server with a Qwen 3.5 of random weights, its tower of the size of 0.8B's, is asked twice about
each of several pictures, and twice about texts of as many tokens. Then a stream of text runs alone,
beside texts and beside pictures that are new to the server: a text's prompt takes a long step, too,
so that the difference is the tower's. One JSON line: seconds to the first token, the second
question about a picture over that about a text, and the gaps between a stream's tokens.
"""

import argparse
import base64
import io
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.live_server import LiveServer
from benchmarks.result import percentiles, print_result
from benchmarks.towers import SHAPES
from tests.entrypoints.test_llm_images import write_seeing

# Steps of some 20 ms on two cores.
_TEXT = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 12,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 3,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 6, 4],
        "mrope_interleaved": True,
    },
}
_SIZE = (640, 480)
_SOFT_TOKENS = 300
_QUESTIONS = ("What is to be seen here, and where was it? ", "How many of them are there in all? ")


def draw_url(seed: int) -> str:
    """Return a picture that no other seed gives."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (_SIZE[1] // 16, _SIZE[0] // 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(_SIZE, Image.Resampling.BICUBIC).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def make_chat(
    seed: int, question: str, *, has_picture: bool, max_tokens: int = 1
) -> dict[str, Any]:
    """Return a chat about a picture, or about a text of as many tokens."""
    if has_picture:
        first: dict[str, Any] = {"type": "image_url", "image_url": {"url": draw_url(seed)}}
    else:
        letters = np.random.default_rng(seed).integers(97, 123, _SOFT_TOKENS + 2)
        first = {"type": "text", "text": "".join(map(chr, letters))}
    content = [first, {"type": "text", "text": question}]
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return {**chat, "stream": True, "ignore_eos": True, "temperature": 0}


def time_tokens(client: httpx.Client, url: str, chat: dict[str, Any]) -> list[float]:
    """Return when each event of an answer came, in seconds from its request on."""
    begin, times = time.perf_counter(), []
    with client.stream("POST", f"{url}/v1/chat/completions", json=chat) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter() - begin)
    return times


def time_questions(client: httpx.Client, url: str, seeds: range) -> dict[str, Any]:
    """Return seconds to the first token of first and second questions."""
    samples: dict[str, list[float]] = {}
    for seed in seeds:
        for what, has_picture in (("text", False), ("picture", True)):
            for number, question in enumerate(_QUESTIONS, 1):
                chat = make_chat(seed, question, has_picture=has_picture)
                samples.setdefault(f"{what}_{number}_s", []).append(
                    time_tokens(client, url, chat)[-1]
                )
    values: dict[str, Any] = {name: percentiles(own) for name, own in samples.items()}
    least = {name: min(own) for name, own in samples.items()}
    values["second_over_text"] = round(values["picture_2_s"]["p50"] / values["text_2_s"]["p50"], 3)
    values["second_over_text_least"] = round(least["picture_2_s"] / least["text_2_s"], 3)
    return values


def time_streams(client: httpx.Client, url: str, rounds: int) -> dict[str, Any]:
    """Return the gaps of a stream alone, and beside texts and pictures that nobody has seen."""
    values: dict[str, Any] = {}
    for what, first_seed in (("alone", 0), ("beside_texts", 10_000), ("beside_pictures", 30_000)):
        stop, seen = threading.Event(), []

        def show(
            stop: threading.Event = stop,
            seen: list[float] = seen,
            first_seed: int = first_seed,
            has_picture: bool = what == "beside_pictures",
        ) -> None:
            with httpx.Client(timeout=600) as other:
                while not stop.is_set():
                    seed = first_seed + len(seen)
                    chat = make_chat(seed, _QUESTIONS[0], has_picture=has_picture)
                    seen.append(time_tokens(other, url, chat)[-1])

        thread = threading.Thread(target=show)
        if what != "alone":
            thread.start()
        gaps: list[float] = []
        # Beside texts nearly every step is long.
        for seed in range(1 if what == "beside_texts" else rounds):
            chat = make_chat(seed, _QUESTIONS[0], has_picture=False, max_tokens=60)
            times = time_tokens(client, url, chat)
            gaps += np.diff(times).tolist()
        stop.set()
        if what != "alone":
            thread.join()
            values[f"{what}_s"] = percentiles(seen)
        values[f"gap_{what}_ms"] = {
            **{name: round(gap * 1e3, 1) for name, gap in percentiles(gaps).items()},
            "p99": round(float(np.quantile(gaps, 0.99)) * 1e3, 1),
            "over_50_ms": sum(gap > 0.05 for gap in gaps),
            "of": len(gaps),
            "most": round(max(gaps) * 1e3, 1),
        }
    return values


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--flags", default="", help="More flags of the server.")
    args = parser.parse_args()
    kind, vision, _ = SHAPES["qwen-0.8b"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        sizes = {**vision, "out_hidden_size": _TEXT["hidden_size"]}
        write_seeing(kind, folder, vision=sizes, text=_TEXT)
        flags = ("--max-model-len", "4096", *args.flags.split())
        with (
            LiveServer(Path(scratch) / "log.txt", str(folder), *flags) as server,
            httpx.Client(timeout=600) as client,
        ):
            time_questions(client, server.url, range(20_000, 20_001))
            values = time_questions(client, server.url, range(args.rounds))
            values |= time_streams(client, server.url, args.rounds)
    print_result("picture_turns", {"rounds": args.rounds, "flags": args.flags}, values)


if __name__ == "__main__":
    main()
