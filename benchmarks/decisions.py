"""Many questions about one document: computed once, computed for each, and by llama.cpp's server.

    python -m benchmarks.decisions MODEL [--questions 20] [--tokens 4000] [--llama-server PROGRAM]
        [--not-for-each] [--serve FLAG ...]

One server, one run of each way, in this order:

    once       POST /v1/decisions, and the same request again
    for each   the same prompts as completions of one token, each under a salt of its own
    llama.cpp  the same prompts, one after another, with its prompt cache; for GGUF files

Hits are held against what the cache's unit allows: all prompts but the first hit what all share,
and in the request that comes again each hits all of itself but its last unit, with equal answers.

Every way reads the same tokens. With llama.cpp they go in as ids, and the two labels' probabilities
are read from its list of likely tokens. Prints one JSON line: seconds, tokens computed, and how far
the probabilities are apart. Run it on a quiet machine: nothing is repeated.
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.llama_server import LlamaServer
from benchmarks.result import print_result

_NUM_LIKELY = 200


def make_document(num_words: int, seed: int = 7) -> str:
    """Return a text of sentences about things that questions ask for."""
    draws = random.Random(seed)
    colours, things = ("red", "green", "blue", "white"), ("lamp", "chair", "door", "box")
    sentences = [
        f"The {draws.choice(things)} {draws.randint(1, 99)} is {draws.choice(colours)}."
        for _ in range(num_words // 5)
    ]
    return " ".join(sentences)


def ask_once(client: httpx.Client, document: str, count: int) -> tuple[float, dict[str, Any]]:
    """Return the seconds of one request for all questions, and its answer."""
    questions = [
        {"type": "predicate", "instructions": f"Is the lamp {i + 1} described as red?"}
        for i in range(count)
    ]
    body = {"input": document, "questions": questions, "return_prompt_token_ids": True}
    began = time.monotonic()
    reply = client.post("/v1/decisions", json=body)
    seconds = time.monotonic() - began
    reply.raise_for_status()
    return seconds, reply.json()


def ask_for_each(client: httpx.Client, prompts: Sequence[Sequence[int]]) -> float:
    """Return the seconds of a completion for each prompt, none of which hits another."""
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "cache_salt": f"salt-{number}"}
        client.post("/v1/completions", json=body).raise_for_status()
    return time.monotonic() - began


def ask_llama_cpp(
    program: str, model: str, prompts: Sequence[Sequence[int]], labels: Sequence[int], threads: int
) -> tuple[float, list[float | None]]:
    """Return the seconds of llama.cpp's server, and the probability of the first label.

    None: a label was not among the likely tokens.
    """
    room = max(map(len, prompts)) + 64
    with LlamaServer(program, model, "-c", str(room), "-np", "1", "-t", str(threads)) as client:
        began = time.monotonic()
        found = [_read_llama_cpp(client, prompt, labels) for prompt in prompts]
        return time.monotonic() - began, found


def _read_llama_cpp(
    client: httpx.Client, prompt: Sequence[int], labels: Sequence[int]
) -> float | None:
    body = {"prompt": list(prompt), "n_predict": 1, "n_probs": _NUM_LIKELY, "cache_prompt": True}
    reply = client.post("/completion", json={**body, "temperature": 0})
    reply.raise_for_status()
    rows = reply.json()["completion_probabilities"][0]
    likely = rows.get("top_logprobs") or rows.get("probs") or []
    logprobs = {row["id"]: row["logprob"] for row in likely if "logprob" in row}
    if not all(label in logprobs for label in labels):
        return None
    weights = [math.exp(logprobs[label]) for label in labels]
    return weights[0] / sum(weights)


def count_hits(prompts: Sequence[Sequence[int]], unit: int) -> tuple[int, int]:
    """Return how many tokens of prompts can hit: the first time, and when all come again."""
    columns = enumerate(zip(*prompts, strict=False))
    shared = next((i for i, column in columns if len(set(column)) > 1), min(map(len, prompts)) - 1)
    again = sum((len(prompt) - 1) // unit * unit for prompt in prompts)
    return (len(prompts) - 1) * (shared // unit * unit), again


def main() -> None:
    """Run all ways once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="What vllm serve takes.")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4000, help="Of the document, about.")
    parser.add_argument("--unit", type=int, default=32, help="--block-size of the server.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--not-for-each", action="store_true", help="Leave the second way out.")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's; needs a GGUF file.")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="Of vllm serve.")
    args = parser.parse_args()
    # Sentences of five words and a number take about seven tokens.
    document = make_document(args.tokens * 5 // 7)
    with tempfile.TemporaryDirectory() as folder:
        flags = (args.model, "--block-size", str(args.unit), *args.serve)
        with (
            LiveServer(Path(folder) / "log", *flags) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            ask_once(client, "Warm.", 2)
            once_s, told = ask_once(client, document, args.questions)
            answers, usage = told["answers"], told["usage"]
            prompts = [answer["prompt_token_ids"] for answer in answers]
            again_s, told_again = ask_once(client, document, args.questions)
            each_s = None if args.not_for_each else ask_for_each(client, prompts)
    first, second = count_hits(prompts, args.unit)
    again = told_again["usage"]["input_tokens_details"]["cached_tokens"]
    num_tokens = sum(map(len, prompts))
    num_cached = usage["input_tokens_details"]["cached_tokens"]
    values: dict[str, Any] = {
        "prompt_tokens": num_tokens,
        "computed_tokens": num_tokens - num_cached,
        "hits": num_cached,
        "possible_hits": first,
        "hits_again": again,
        "possible_hits_again": second,
        "equal_bits_again": told_again["answers"] == answers,
        "once_s": round(once_s, 3),
        "again_s": round(again_s, 3),
    }
    if each_s is not None:
        values |= {"for_each_s": round(each_s, 3), "times": round(each_s / once_s, 2)}
    if args.llama_server is not None:
        labels = [path[0] for path in answers[0]["label_token_ids"]]
        seconds, found = ask_llama_cpp(args.llama_server, args.model, prompts, labels, args.threads)
        values["llama_cpp_s"] = round(seconds, 3)
        pairs = zip(found, answers, strict=True)
        apart = [abs(p - answer["probability"]) for p, answer in pairs if p is not None]
        values["llama_cpp_compared"] = len(apart)
        values["llama_cpp_largest_difference"] = round(max(apart, default=0.0), 4)
    config = {"model": Path(args.model).name, "questions": args.questions, "threads": args.threads}
    print_result("decisions", config, values)


if __name__ == "__main__":
    main()
