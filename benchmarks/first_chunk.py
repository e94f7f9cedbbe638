"""How soon does a stream begin whose answer must be a call?

    python -m benchmarks.first_chunk [--rounds 40] [--url URL]

Chats of equal length on the embedded checkpoint take turns: free, with tools, with a call that is
forced by a grammar which the server has compiled before, and by one that it sees for the first
time. One JSON line: seconds to the first event, to the first one that says something, and the
shares that a grammar adds to a chat with tools.
"""

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.result import percentiles, print_result

_NUM_WARM_UP = 3
_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


def _tool(number: int) -> dict[str, Any]:
    """A tool of the kind agents have; its number makes another grammar of it."""
    parameters = {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000 + number},
            "mode": {"enum": ["read", "write", "list"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["path", "mode"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": f"open_{number:04}", "parameters": parameters}}


def make_chats(number: int) -> dict[str, dict[str, Any]]:
    """Return one chat of each kind; all prompts but the free one's have as many tokens."""
    text = f"Round {number:04}. " + "What does the file hold, and who wrote it? " * 10
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "stream": True}
    chat |= {"chat_template_kwargs": {"thinking": False}}
    return {
        "free": chat,
        "tools": {**chat, "tools": [_tool(0)]},
        "forced": {**chat, "tools": [_tool(0)], "tool_choice": "required"},
        "forced_new": {**chat, "tools": [_tool(number + 1)], "tool_choice": "required"},
    }


def time_chat(client: httpx.Client, url: str, chat: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds to the first event and to the first that says something."""
    begin = time.perf_counter()
    first = said = 0.0
    with client.stream("POST", f"{url}/v1/chat/completions", json=chat) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter() - begin
            first = first or now
            choices = json.loads(line.removeprefix("data: "))["choices"]
            if not said and any(c["delta"].get(name) for c in choices for name in _FIELDS):
                said = now
    return first, said or time.perf_counter() - begin


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--url", help="Of a server that runs; default: one is started.")
    args = parser.parse_args()
    first: dict[str, list[float]] = {name: [] for name in make_chats(0)}
    said: dict[str, list[float]] = {name: [] for name in first}
    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log.txt"
            url = stack.enter_context(LiveServer(log, "deepseek-v4", "--max-model-len", "2048")).url
        client = stack.enter_context(httpx.Client(timeout=120))
        for number in range(_NUM_WARM_UP + args.rounds):
            for name, chat in make_chats(number).items():
                seconds = time_chat(client, url, chat)
                if number >= _NUM_WARM_UP:
                    first[name].append(seconds[0])
                    said[name].append(seconds[1])
    values: dict[str, Any] = {f"{name}_s": percentiles(samples) for name, samples in first.items()}
    values |= {f"{name}_said_s": percentiles(samples) for name, samples in said.items()}
    base = values["tools_s"]["p50"]
    for name in ("forced", "forced_new"):
        values[f"{name}_share"] = round(values[f"{name}_s"]["p50"] / base - 1, 3)
    print_result("first_chunk", {"rounds": args.rounds}, values)


if __name__ == "__main__":
    main()
