"""Pictures over a prefill and a decode server: the answers of one, and no other picture's rows.

    python -m benchmarks.image_handover [--family qwen35] [--model FOLDER] [--pictures 8]

Starts a prefill server, a decode server with the example's proxy in front of both, and one server
that does all. They serve the same model that sees: a tiny one of random weights, or a given one.
Questions about pictures of one size, whose prompts have equal token ids, go to the proxy and to the
one server. One line of JSON tells how many answers or log probabilities differed, and how many
prompt tokens came from the prefill server.
"""

import argparse
import base64
import io
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.disaggregated import free_port, metric, start_proxy, transfer_flags
from benchmarks.live_server import LiveServer
from benchmarks.result import print_result
from tests.entrypoints.test_llm_images import write_seeing

_QUESTIONS = ("What is this?", "How many are there?", "Where is it?")


def ask(url: str, picture: str, question: str) -> Any:
    """Return an answer with its log probabilities."""
    parts = [
        {"type": "text", "text": "Look at this page, then answer what is asked about it."},
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": question},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    bits = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["message"]["content"], bits


def draw_pictures(count: int) -> list[str]:
    """Return pictures of one size, as URLs."""
    draws = np.random.default_rng(0)
    pictures = []
    for _ in range(count):
        out = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (150, 200, 3), np.uint8)).save(out, "PNG")
        pictures.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    return pictures


def run(model: str, num_pictures: int, folder: Path) -> dict[str, int]:
    """Start everything, ask everything, compare."""
    flags = (model, "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "4")
    flags += ("--kv-cache-memory-bytes", str(64 << 20))
    kv_port = free_port()
    told = {"asked": 0, "different": 0}
    with ExitStack() as stack:

        def start(name: str, *more: str) -> str:
            return stack.enter_context(LiveServer(folder / f"{name}.txt", *flags, *more)).url

        plain = start("plain")
        prefill = start("prefill", *transfer_flags("kv_producer", kv_port))
        decode = start("decode", *transfer_flags("kv_consumer", kv_port))
        proxy = start_proxy(stack, prefill, decode)
        for question in _QUESTIONS:
            for picture in draw_pictures(num_pictures):
                told["asked"] += 1
                told["different"] += ask(proxy, picture, question) != ask(plain, picture, question)
        told["external_tokens"] = int(metric(decode, "vllm:external_prefix_cache_hits_total"))
    return told


def main() -> int:
    """Run; 1: an answer differed, or no prompt came from the prefill server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="qwen35", help="Of the tiny model.")
    parser.add_argument("--model", metavar="FOLDER", help="Another one that sees.")
    parser.add_argument("--pictures", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.model is None:
            write_seeing(args.family, folder)
        told = run(args.model or scratch, args.pictures, folder)
    config = {"model": args.model or args.family, "pictures": args.pictures}
    print_result("image_handover", config, told)
    return int(told["different"] > 0 or not told["external_tokens"])


if __name__ == "__main__":
    sys.exit(main())
