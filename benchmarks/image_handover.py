"""Pictures over a prefill and a decode server: the answers of one, and no other picture's rows.

    python -m benchmarks.image_handover --url PROXY --plain SERVER

Both serve the same model that sees. Questions about pictures of one size, whose prompts have equal
token ids, go to both. One line of JSON tells how many answers and log probabilities were equal, and
how many prompt tokens came from the prefill server.
"""

import argparse
import base64
import io
import json
import sys
from typing import Any

import httpx
import numpy as np
from PIL import Image

_QUESTIONS = ("What is this?", "How many are there?", "Where is it?")


def ask(url: str, picture: str, question: str) -> tuple[Any, int]:
    """Return an answer with its log probabilities, and the tokens that came from elsewhere."""
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
    told = answer.json()
    choice = told["choices"][0]
    bits = [token["logprob"] for token in choice["logprobs"]["content"]]
    details = told["usage"].get("prompt_tokens_details") or {}
    return (choice["message"]["content"], bits), int(details.get("external_tokens", 0))


def main() -> int:
    """Run; 1: an answer differed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="Of what stands in front of the pair.")
    parser.add_argument("--plain", required=True, help="Of the one server.")
    parser.add_argument("--pictures", type=int, default=8)
    args = parser.parse_args()
    draws = np.random.default_rng(0)
    pictures = []
    for _ in range(args.pictures):
        out = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (150, 200, 3), np.uint8)).save(out, "PNG")
        pictures.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    told = {"asked": 0, "different": 0, "external_tokens": 0}
    for question in _QUESTIONS:
        for picture in pictures:
            expected, _ = ask(args.plain, picture, question)
            found, num_external = ask(args.url, picture, question)
            told["asked"] += 1
            told["different"] += found != expected
            told["external_tokens"] += num_external
    print(json.dumps(told))
    return int(told["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
