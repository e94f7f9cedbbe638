"""Several agents at once over HTTP: seconds in all, to each first token, and how much was hit.

    python -m benchmarks.agent_turns MODEL [--sessions 6] [--turns 5] [--llama-server PROGRAM]
        [--serve FLAG ...]

All sessions share a system prompt. Each sends its turns one after another without a pause, every
turn with all that was said before, as agents do. Each way has a server of its own, started anew:

    default    vllm serve with the flags after --serve
    int8       the same with --quantized-inputs int8
    llama.cpp  its server with a slot for each session, on the same file

Prints one JSON line. Run it on a quiet machine: nothing is repeated.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.llama_server import LlamaServer
from benchmarks.result import percentiles, print_result

_SENTENCE = (
    "the file function value returns error test line cache block reads writes name list index "
    "path call when before after and not with from into each first last empty open closed"
)


@dataclass(frozen=True)
class Shape:
    """What agents send.

    Attributes:
        sessions: Agents at once.
        turns: Of each.
        system_words: Of the prompt that all share.
        turn_words: Of each turn's message.
        answer_tokens: Of each answer, no more and no less.
    """

    sessions: int
    turns: int
    system_words: int
    turn_words: int
    answer_tokens: int


@dataclass(frozen=True)
class Turn:
    """One answer: seconds to its first token, tokens of its prompt, and how many were cached."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int


def write_words(count: int, seed: int) -> str:
    """Return words that no other seed gives, in sentences."""
    draws, known = random.Random(seed), _SENTENCE.split()
    words = [draws.choice(known) for _ in range(count)]
    return " ".join(word + "." if i % 12 == 11 else word for i, word in enumerate(words))


def talk(client: httpx.Client, model: str, shape: Shape, session: int) -> Iterator[Turn]:
    """Hold one session, and yield each of its turns."""
    messages = [{"role": "system", "content": write_words(shape.system_words, 0)}]
    for turn in range(shape.turns):
        seed = 1 + session * shape.turns + turn
        messages.append({"role": "user", "content": write_words(shape.turn_words, seed)})
        found, answer = _send(client, model, messages, shape.answer_tokens)
        messages.append({"role": "assistant", "content": answer})
        yield found


def _send(
    client: httpx.Client, model: str, messages: list[dict[str, str]], answer_tokens: int
) -> tuple[Turn, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first_s, parts, usage = time.monotonic(), None, [], {}
    # A connection for each: servers close those that rest, and a request on its way would be lost.
    headers = {"Connection": "close"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.read().decode()[:500]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first_s = time.monotonic() - began if first_s is None else first_s
                    parts.append(text)
    if first_s is None:
        first_s = time.monotonic() - began
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(first_s, usage["prompt_tokens"], cached), "".join(parts)


def run(client: httpx.Client, model: str, shape: Shape) -> dict[str, Any]:
    """Hold all sessions at once, and return what they took."""
    list(talk(client, model, Shape(1, 1, 8, 8, 2), -1))
    began = time.monotonic()
    with ThreadPoolExecutor(shape.sessions) as pool:
        held = pool.map(lambda i: list(talk(client, model, shape, i)), range(shape.sessions))
        turns = [turn for session in held for turn in session]
    seconds = time.monotonic() - began
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    found = {
        "seconds": round(seconds, 2),
        "first_s": percentiles([turn.first_s for turn in turns]),
        "prompt_tokens": prompt_tokens,
        "longest_prompt": max(turn.prompt_tokens for turn in turns),
        "hit_share": round(sum(turn.cached_tokens for turn in turns) / prompt_tokens, 4),
    }
    print(found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run all ways once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="What vllm serve takes.")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system-words", type=int, default=1250, help="About 1,400 tokens.")
    parser.add_argument("--turn-words", type=int, default=110)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2, help="Of llama.cpp's server.")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's; needs a GGUF file.")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="Of vllm serve.")
    args = parser.parse_args()
    shape = Shape(args.sessions, args.turns, args.system_words, args.turn_words, args.answer_tokens)
    values: dict[str, Any] = {}
    ways = {"default": (), "int8": ("--quantized-inputs", "int8")}
    for name, flags in ways.items():
        with (
            tempfile.TemporaryDirectory() as folder,
            LiveServer(Path(folder) / "log", args.model, *flags, *args.serve) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            model = client.get("/v1/models").json()["data"][0]["id"]
            values[name] = run(client, model, shape)
    if args.llama_server is not None:
        room = 2 * (args.system_words + args.turns * (args.turn_words + args.answer_tokens))
        slots = ("-np", str(args.sessions), "-c", str(room * args.sessions))
        flags = (*slots, "-t", str(args.threads))
        with LlamaServer(args.llama_server, args.model, *flags) as client:
            values["llama.cpp"] = run(client, "any", shape)
    config = {"model": Path(args.model).name, **vars(shape), "threads": args.threads}
    print_result("agent_turns", config, values)


if __name__ == "__main__":
    main()
