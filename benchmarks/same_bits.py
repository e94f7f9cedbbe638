"""Whether a request's answer depends on what else the server does.

    python -m benchmarks.same_bits [--requests 1000] [--tokens 8] [--settings crowd,chunks]

Random prompts, half of them behind one of a few long prefixes, go one by one to a server that runs
one request at a time on one thread and caches nothing; every second answer is drawn, with a seed.
The same prompts then go all at once, in another order, to servers with other settings. An answer
counts as equal if its token ids and every log probability, top five included, are (``==``). One
JSON line; exits with 1 if any differs.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result

MODEL_NAME = "measured"
COMMON = ("--block-size", "32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "256M")
COMMON += ("--served-model-name", MODEL_NAME)
ALONE = ("--max-num-seqs", "1", "--no-enable-prefix-caching")
# Name -> (flags, requests in flight, threads).
SETTINGS: dict[str, tuple[tuple[str, ...], int, int]] = {
    "crowd": (("--max-num-seqs", "64", "--no-enable-prefix-caching"), 64, 1),
    "threads": (("--max-num-seqs", "64", "--no-enable-prefix-caching"), 64, 2),
    "chunks": (("--max-num-seqs", "16", "--max-num-batched-tokens", "64"), 32, 1),
    "hits": (
        (
            "--max-num-seqs",
            "64",
        ),
        48,
        2,
    ),
    "drafts": (
        (
            "--max-num-seqs",
            "32",
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 4}',
        ),
        32,
        1,
    ),
}
SEED = 16


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of 2 to 300 tokens."""
    rng = random.Random(SEED)

    def draw(length: int) -> list[int]:
        # Few different tokens: drafts from the prompt itself come true sometimes.
        return [rng.randrange(5, rng.choice((30, 1000))) for _ in range(length)]

    prefixes = [draw(rng.randrange(60, 250)) for _ in range(8)]
    return [
        (rng.choice(prefixes) if rng.random() < 0.5 else []) + draw(rng.randrange(2, 50))
        for _ in range(count)
    ]


async def ask_all(
    url: str, prompts: Sequence[list[int]], num_tokens: int, in_flight: int
) -> list[Any]:
    """Return the answers in the order of the prompts; they are sent in another."""
    gate = asyncio.Semaphore(in_flight)
    answers: list[Any] = [None] * len(prompts)

    async def ask(client: httpx.AsyncClient, index: int) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": prompts[index],
            "max_tokens": num_tokens,
            "temperature": 0.8 * (index % 2),
            "top_p": 0.95,
            "seed": index,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
        }
        async with gate:
            response = await client.post(f"{url}/v1/completions", json=body)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        answers[index] = (choice["token_ids"], choice["logprobs"])

    order = list(range(len(prompts)))
    if in_flight > 1:
        random.Random(SEED + in_flight).shuffle(order)
    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(ask(client, index) for index in order))
    return answers


def answer_with(
    folder: Path,
    model: str,
    flags: Sequence[str],
    prompts: Sequence[list[int]],
    num_tokens: int,
    in_flight: int,
    threads: int,
) -> list[Any]:
    """Return the answers of a server of its own."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with LiveServer(folder / "server.log", model, *COMMON, *flags) as server:
        return asyncio.run(ask_all(server.url, prompts, num_tokens, in_flight))


def main() -> int:
    """Compare all settings with requests one by one; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="deepseek-v4", help="A folder or GGUF file; of 1,000 tokens at least."
    )
    parser.add_argument("--dtype", default="auto", help="As the server's.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    args = parser.parse_args()
    prompts, dtype = make_prompts(args.requests), ("--dtype", args.dtype)
    equal: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = answer_with(folder, args.model, (*ALONE, *dtype), prompts, args.tokens, 1, 1)
        for setting in args.settings.split(","):
            flags, in_flight, threads = SETTINGS[setting]
            answers = answer_with(
                folder, args.model, (*flags, *dtype), prompts, args.tokens, in_flight, threads
            )
            equal[setting] = sum(a == b for a, b in zip(answers, alone, strict=True))
    options = {
        "model": args.model,
        "dtype": args.dtype,
        "requests": args.requests,
        "tokens": args.tokens,
    }
    print_result("same_bits", options, equal)
    return int(any(count < args.requests for count in equal.values()))


if __name__ == "__main__":
    sys.exit(main())
