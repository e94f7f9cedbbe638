"""Exams of a trained model, cold and warm, beside llama.cpp's server on the same file.

    python -m benchmarks.real_weights.exams --examiner PYTHON [--llama-server PROGRAM]

HumanEval (a function from its head and docstring) and BFCL (function calls: one function, one of
several, several calls, irrelevant tools, conversations of several turns). PYTHON is the interpreter
of an environment with their packages: docs/real_weights.md says how to make it. **It runs programs
that the model wrote**, with the guards that HumanEval's package has and no others.

This server is asked twice, so that the second answers come from the cache: they must be equal, word
for word. llama.cpp rounds the inputs of products to eight bits; ``--inputs int8`` does so here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.llama_server import LlamaServer
from benchmarks.real_weights.models import MODELS, fetch
from benchmarks.result import print_result

CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
CONVERSATIONS = "multi_turn_base"
# Where a function of HumanEval has ended.
_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_LENGTH, _TOGETHER, _MOST_STEPS = 8192, 4, 6


class ContextFull(Exception):
    """A conversation has grown beyond what the server reads."""


class Examiner:
    """The process that knows the questions and marks the answers."""

    def __init__(self, interpreter: str) -> None:
        script = str(Path(__file__).with_name("exam_grader.py"))
        self._process = subprocess.Popen(
            [interpreter, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = Lock()

    def ask(self, do: str, **message: Any) -> Any:
        """Returns the answer to a message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"do": do, **message}) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"answer"'):
                    return json.loads(line)["answer"]
        raise RuntimeError(f"the examiner ended with {self._process.wait()}")


class Candidate:
    """A server that is examined; answers are kept for comparison.

    Args:
        client: Of its server.
        run: A name of its own for each run: conversations have a world for each.
    """

    def __init__(self, client: httpx.Client, examiner: Examiner, run: str) -> None:
        self._client = client
        self._examiner = examiner
        self._run = run
        self.answers: dict[str, Any] = {}
        self.prompt_tokens = self.cached_tokens = 0

    def write_function(self, problem: dict[str, Any]) -> bool:
        """Whether a function of HumanEval passes its tests."""
        body = {"prompt": problem["prompt"], "stop": list(_STOPS), "max_tokens": 384}
        text = self._post("/v1/completions", body)["choices"][0]["text"]
        self.answers[problem["id"]] = text
        # A stop that begins the answer would leave no function at all.
        return bool(self._examiner.ask("run_program", name=problem["id"], completion=text))

    def call(self, category: str, entry: dict[str, Any]) -> bool:
        """Whether the calls of an entry of BFCL are right."""
        ask = self._converse if len(entry["turns"]) > 1 else self._call_once
        try:
            return ask(category, entry)
        except ContextFull:
            self.answers[entry["id"]] = "the context is full"
            return False

    def _call_once(self, category: str, entry: dict[str, Any]) -> bool:
        message = self._chat(entry["turns"][0], entry["tools"])
        calls = read_calls(message)
        self.answers[entry["id"]] = [message.get("content"), calls]
        return bool(self._examiner.ask("grade", category=category, name=entry["id"], calls=calls))

    def _converse(self, category: str, entry: dict[str, Any]) -> bool:
        name: dict[str, Any] = {"category": category, "name": entry["id"], "run": self._run}
        messages: list[dict[str, Any]] = []
        turns: list[list[list[str]]] = []
        for turn in entry["turns"]:
            messages += turn
            turns.append([])
            for _ in range(_MOST_STEPS):
                message = self._chat(messages, entry["tools"])
                messages.append(
                    {k: v for k, v in message.items() if k in ("role", "content", "tool_calls")}
                )
                calls = read_calls(message)
                if not calls:
                    break
                words = [write_call(call) for call in calls]
                turns[-1].append(words)
                told = self._examiner.ask("execute", **name, calls=words)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, text in zip(message["tool_calls"], told, strict=True)
                ]
        self.answers[entry["id"]] = turns
        return bool(self._examiner.ask("grade_turns", **name, turns=turns))

    def _chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        body = {"messages": list(messages), "tools": list(tools), "max_tokens": 256}
        message: dict[str, Any] = self._post("/v1/chat/completions", body)["choices"][0]["message"]
        return message

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._client.post(path, json={"model": "exam", "temperature": 0, **body})
        if reply.status_code == httpx.codes.BAD_REQUEST and "context" in reply.text:
            raise ContextFull
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:500]}")
        told: dict[str, Any] = reply.json()
        usage = told["usage"]
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return told


def read_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the names and arguments of a message's calls; what is no object has none."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError:
            arguments = {}
        arguments = arguments if isinstance(arguments, dict) else {}
        calls.append({"name": function["name"], "arguments": arguments})
    return calls


def write_call(call: dict[str, Any]) -> str:
    """Returns a call as the words of Python that BFCL runs."""
    arguments = ", ".join(f"{name}={value!r}" for name, value in call["arguments"].items())
    return f"{call['name']}({arguments})"


def examine(
    candidate: Candidate, examiner: Examiner, problems: int, counts: Mapping[str, int]
) -> dict[str, Any]:
    """Returns how many of how many answers are right, by exam.

    Args:
        candidate: Is examined.
        examiner: Marks it.
        problems: Of HumanEval.
        counts: Entries of each category of BFCL.
    """
    asked: dict[str, tuple[Callable[[Any], bool], list[Any]]] = {
        "human_eval": (candidate.write_function, examiner.ask("list_problems", count=problems))
    }
    for category, count in counts.items():
        entries = examiner.ask("list_entries", category=category, count=count)
        asked[category] = (lambda entry, c=category: candidate.call(c, entry), entries)  # type: ignore[misc]
    figures = {}
    for name, (answer, entries) in asked.items():
        with ThreadPoolExecutor(_TOGETHER) as pool:
            right = sum(pool.map(answer, entries))
        figures[name] = f"{right} of {len(entries)}"
        print(f"  {name}: {figures[name]}", file=sys.stderr, flush=True)
    if candidate.prompt_tokens:
        figures["cached_share"] = str(round(candidate.cached_tokens / candidate.prompt_tokens, 3))
    return figures


def main() -> int:
    """Examine; the exit code is 1 if a warm answer differs from the cold one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights.exams")
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-coder")
    parser.add_argument("--examiner", metavar="PYTHON", required=True)
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--inputs", choices=["exact", "int8"], default="exact")
    parser.add_argument("--each", type=int, default=40, help="Entries of each category of BFCL.")
    parser.add_argument("--conversations", type=int, default=10, help="Of its several turns.")
    parser.add_argument("--problems", type=int, default=164, help="Of HumanEval.")
    args = parser.parse_args()
    path, examiner = fetch(args.model), Examiner(args.examiner)
    counts = dict.fromkeys(CATEGORIES, args.each) | {CONVERSATIONS: args.conversations}
    num_threads = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {}

    def run(name: str, client: httpx.Client) -> dict[str, Any]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        candidate = Candidate(client, examiner, name)
        found = examine(candidate, examiner, args.problems, counts)
        figures.update({f"{name}_{key}": value for key, value in found.items()})
        return candidate.answers

    with tempfile.TemporaryDirectory() as folder:
        flags = [str(path), "--served-model-name", "exam", "--max-model-len", str(_LENGTH)]
        flags += ["--block-size", "32", "--quantized-inputs", args.inputs]
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        with (
            LiveServer(Path(folder) / "server.log", *flags) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            cold, warm = run("cold", client), run("warm", client)
    differing = [name for name, answer in cold.items() if warm[name] != answer]
    figures["warm_answers_that_differ"] = len(differing)
    if args.llama_server is not None:
        rooms = (
            "-c",
            str(_LENGTH * _TOGETHER),
            "-np",
            str(_TOGETHER),
            "--jinja",
            "-t",
            str(num_threads),
        )
        with LlamaServer(args.llama_server, str(path), *rooms) as rival:
            told = run("llama_cpp", rival)
        figures["answers_equal_to_llama_cpp"] = sum(told[n] == a for n, a in cold.items())
    config = {"file": MODELS[args.model].file, "inputs": args.inputs, "each": args.each}
    print_result("real_weights_exams", config, figures)
    for name in differing[:5]:
        print(f"{name}: {cold[name]!r} and then {warm[name]!r}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
