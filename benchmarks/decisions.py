"""Many questions about one document: computed once, computed for each, and by llama.cpp's server.

    python -m benchmarks.decisions MODEL [--questions 20] [--tokens 4000] [--llama-server PROGRAM]

One server, one run of each way, in this order:

    once       POST /v1/decisions
    for each   the same prompts as completions of one token, each under a salt of its own
    llama.cpp  the same prompts, one after another, with its prompt cache; for GGUF files

Every way reads the same tokens. With llama.cpp they go in as ids, and the two labels' probabilities
are read from its list of likely tokens. Prints one JSON line: seconds, tokens computed, and how far
the probabilities are apart. Run it on a quiet machine: nothing is repeated.
"""

import argparse
import math
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.result import print_result

_NUM_LIKELY = 200
_WAIT_S = 300


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    room = max(map(len, prompts)) + 64
    command = [program, "-m", model, "--port", str(port), "-c", str(room), "-np", "1"]
    command += ["-t", str(threads), "-ngl", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
            _wait_for(client)
            began = time.monotonic()
            found = [_read_llama_cpp(client, prompt, labels) for prompt in prompts]
            return time.monotonic() - began, found
    finally:
        server.terminate()
        server.wait()


def _wait_for(client: httpx.Client) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError as error:
            if time.monotonic() > deadline:
                raise RuntimeError("llama.cpp's server did not start") from error
        time.sleep(0.1)


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


def main() -> None:
    """Run all ways once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="What vllm serve takes.")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4000, help="Of the document, about.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's; needs a GGUF file.")
    args = parser.parse_args()
    # Sentences of five words and a number take about seven tokens.
    document = make_document(args.tokens * 5 // 7)
    with tempfile.TemporaryDirectory() as folder:
        flags = (args.model, "--max-model-len", str(2 * args.tokens + 512))
        with (
            LiveServer(Path(folder) / "log", *flags) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            ask_once(client, "Warm.", 2)
            once_s, told = ask_once(client, document, args.questions)
            answers, usage = told["answers"], told["usage"]
            prompts = [answer["prompt_token_ids"] for answer in answers]
            again_s, _ = ask_once(client, document, args.questions)
            each_s = ask_for_each(client, prompts)
    num_tokens = sum(map(len, prompts))
    num_cached = usage["input_tokens_details"]["cached_tokens"]
    values: dict[str, Any] = {
        "prompt_tokens": num_tokens,
        "computed_tokens": num_tokens - num_cached,
        "once_s": round(once_s, 3),
        "again_s": round(again_s, 3),
        "for_each_s": round(each_s, 3),
        "times": round(each_s / once_s, 2),
    }
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
