"""Many vectors: our server's, and llama.cpp's on the same file.

    python -m benchmarks.embeddings MODEL [--texts 1000] [--tokens 200] [--llama-server PROGRAM]

Texts are token ids, so both read the same; vectors are those of the last token, of length 1. They
come in requests of ``--together`` texts, one request after another. Prints one JSON line: seconds,
tokens a second, and the least cosine between the two servers' vectors of the first texts. Run it on
a quiet machine: nothing is repeated.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.llama_server import LlamaServer
from benchmarks.result import print_result

_NUM_COMPARED = 16
# Below these are special tokens and bytes, in most vocabularies.
_LEAST_ID, _MOST_ID = 1000, 30_000

Vectors = list[list[float]]


def make_texts(count: int, num_tokens: int, seed: int = 5) -> list[list[int]]:
    """Return texts that share nothing."""
    draws = random.Random(seed)
    return [[draws.randrange(_LEAST_ID, _MOST_ID) for _ in range(num_tokens)] for _ in range(count)]


def embed(client: httpx.Client, texts: Sequence[Sequence[int]]) -> Vectors:
    """Return the vectors of one request, by a route that both servers have."""
    reply = client.post("/v1/embeddings", json={"input": texts, "encoding_format": "float"})
    reply.raise_for_status()
    rows = sorted(reply.json()["data"], key=lambda row: row["index"])
    return [row["embedding"] for row in rows]


def timed(client: httpx.Client, texts: Sequence[list[int]], together: int) -> tuple[float, Vectors]:
    """Return the seconds of all texts, and the vectors of the first."""
    embed(client, make_texts(2, 8, seed=1))
    first: Vectors = []
    began = time.monotonic()
    for at in range(0, len(texts), together):
        made = embed(client, texts[at : at + together])
        first += made[: _NUM_COMPARED - len(first)]
    return time.monotonic() - began, first


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return that of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def main() -> None:
    """Run each server once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="What vllm serve takes.")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200, help="Of each text.")
    parser.add_argument("--together", type=int, default=50, help="Texts of a request.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's; needs a GGUF file.")
    args = parser.parse_args()
    texts = make_texts(args.texts, args.tokens)
    num_tokens = args.texts * args.tokens
    values: dict[str, Any] = {}

    def note(name: str, run: Callable[[], tuple[float, Vectors]]) -> Vectors:
        seconds, first = run()
        values[f"{name}_s"] = round(seconds, 3)
        values[f"{name}_tokens_per_s"] = round(num_tokens / seconds, 1)
        return first

    with (
        tempfile.TemporaryDirectory() as folder,
        LiveServer(Path(folder) / "log", args.model) as server,
        httpx.Client(base_url=server.url, timeout=None) as client,
    ):
        ours = note("ours", lambda: timed(client, texts, args.together))
    if args.llama_server is not None:
        batch = str(max(512, args.tokens))
        flags = ("--embedding", "--pooling", "last", "-b", batch, "-ub", batch)
        flags += ("-t", str(args.threads))
        with LlamaServer(args.llama_server, args.model, *flags) as client:
            theirs = note("llama_cpp", lambda: timed(client, texts, args.together))
        cosines = [cosine(*pair) for pair in zip(ours, theirs, strict=True)]
        values["least_cosine"] = round(min(cosines), 6)
    config = {
        "model": Path(args.model).name,
        "texts": args.texts,
        "tokens": args.tokens,
        "together": args.together,
        "threads": args.threads,
    }
    print_result("embeddings", config, values)


if __name__ == "__main__":
    main()
