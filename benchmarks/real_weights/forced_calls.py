"""Calls that a request insists on: each answer ends as one, whatever the model would rather say.

    python -m benchmarks.real_weights --checks forced_calls

Drawn from a seed: one to four tools with flat, nested and optional arguments, any of them or a
named one, streamed or not, sampled or not, one call or several. An answer is right if it ends by
itself as calls of offered functions whose arguments follow their schemas. Texts and lists of the
tools have limits: a small model does not end every one by itself, and no grammar knows where.
"""

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from benchmarks.live_server import LiveServer
from benchmarks.real_weights.checks import Report
from benchmarks.real_weights.schemas import NUMBER, TRUTH, WHOLE, shape

_MAX_TOKENS, _TOGETHER = 512, 8
_TEXT = {"type": "string", "maxLength": 80}
_TEXTS = {"type": "array", "items": _TEXT, "maxItems": 3}
_WHERE = shape(lat=NUMBER, lon=NUMBER)
_PERSON = shape(["name"], name=_TEXT, age=WHOLE, home=_WHERE)
TOOLS: Mapping[str, dict[str, Any]] = {
    "get_weather": shape(["city"], city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    "add": shape(a=NUMBER, b=NUMBER),
    "book_table": shape(["guests", "on"], guests=WHOLE, on={"type": "string", "format": "date"}),
    "send_mail": shape(["to", "body"], to=_TEXTS, body=_TEXT, copy=TRUTH),
    "list_files": shape([], folder=_TEXT, deep=TRUTH),
    "save_person": shape(["person"], person=_PERSON, tags=_TEXTS),
    "set_values": shape(values=shape([], red=WHOLE, green=WHOLE, blue=WHOLE)),
    "route": shape(start=_WHERE, end={"anyOf": [_WHERE, _TEXT]}),
    "now": {"type": "object", "properties": {}},
    "find": shape(["text"], text=_TEXT, limit={"anyOf": [WHOLE, {"type": "null"}]}),
}
_QUESTIONS = (
    "What is the weather in Oslo?",
    "Add 17 and 25.",
    "Book a table for four on the first of May 2026.",
    "Write to Ann and Bob that the meeting is at ten.",
    "Which files are in the folder notes?",
    "Save that Ann is 41 years old and lives in Rome.",
    "Set red to 5, green to 7 and blue to 9.",
    "How do I get from Berlin to Paris?",
    "Tell me a joke about a lighthouse.",
    "Find three texts about bread and one about rivers.",
)


def draw_request(rng: random.Random) -> dict[str, Any]:
    """Return a request that must be answered by calls."""
    names = rng.sample(sorted(TOOLS), rng.randint(1, 4))
    choice: Any = "required"
    if rng.random() < 0.4:
        choice = {"type": "function", "function": {"name": rng.choice(names)}}
    request = {
        "messages": [{"role": "user", "content": rng.choice(_QUESTIONS)}],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}
            for name in names
        ],
        "tool_choice": choice,
        "temperature": rng.choice((0.0, 0.0, 0.7)),
        "seed": rng.randrange(1 << 30),
        "max_tokens": _MAX_TOKENS,
        "stream": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        request["parallel_tool_calls"] = False
    return request


def find_fault(request: Mapping[str, Any], reason: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong with an answer's calls; empty: nothing."""
    if reason != "tool_calls":
        return f"it ended by {reason!r} behind {len(calls)} calls"
    choice = request["tool_choice"]
    offered = {tool["function"]["name"] for tool in request["tools"]}
    if isinstance(choice, dict):
        offered = {choice["function"]["name"]}
    is_one = isinstance(choice, dict) or request.get("parallel_tool_calls") is False
    if is_one and len(calls) != 1:
        return f"{len(calls)} calls where one was asked for"
    for call in calls:
        if call["name"] not in offered:
            return f"it called {call['name']!r}"
        arguments = json.loads(call["arguments"])
        for fault in Draft202012Validator(TOOLS[call["name"]]).iter_errors(arguments):
            return f"{call['arguments'][:200]}: {fault.message}"
    return ""


def check_forced_calls(path: Path, num_calls: int, seed: int) -> Report:
    """Ask for calls; how many answers ended as such.

    Args:
        path: The model's file.
        num_calls: Requests.
        seed: Of the requests.
    """
    report = Report({"requests": num_calls, "right": 0, "calls": 0})
    with tempfile.TemporaryDirectory() as folder:
        flags = [str(path), "--served-model-name", "m", "--max-model-len", "4096"]
        flags += ["--tool-call-parser", "hermes"]
        with (
            LiveServer(Path(folder) / "server.log", *flags) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            requests = [draw_request(random.Random(f"{seed} {i}")) for i in range(num_calls)]
            with ThreadPoolExecutor(_TOGETHER) as pool:
                answers = list(pool.map(partial(_ask, client), requests))
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                reason, calls, text = answer
                fault = find_fault(request, reason, calls)
                report.figures["right"] += not fault
                report.figures["calls"] += len(calls)
                if fault:
                    report.faults.append(f"request {number}: {fault}; it said {text[-200:]!r}")
    return report


def _ask(client: httpx.Client, request: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Why an answer ended, its calls, and all that it said."""
    body = {"model": "m", **request}
    if not request["stream"]:
        reply = client.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return choice["finish_reason"], calls, str(message.get("content") or calls)
    told: list[dict[str, str]] = []
    reason, said = "", ""
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                reason = choice["finish_reason"] or reason
                said += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or []:
                    if piece["index"] == len(told):
                        told.append({"name": piece["function"]["name"], "arguments": ""})
                    told[piece["index"]]["arguments"] += piece["function"].get("arguments") or ""
    return reason, [dict(call) for call in told], said or str(told)
