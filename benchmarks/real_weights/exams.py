"""Exams of a trained model, cold and warm, beside llama.cpp's server on the same file.

    python -m benchmarks.real_weights.exams --examiner PYTHON [--llama-server PROGRAM]
        [--results FILE [--minutes N]] [--exams NAME...]

HumanEval (a function from its head and docstring) and BFCL (function calls: one function, one of
several, several calls, irrelevant tools, conversations of several turns). PYTHON is the interpreter
of an environment with their packages: docs/real_weights.md says how to make it. **It runs programs
that the model wrote**, with the guards that HumanEval's package has and no others.

This server is asked twice, so that the second answers come from the cache: they must be equal, word
for word. llama.cpp rounds the inputs of products to eight bits; ``--inputs int8`` does so here.

With ``--results`` each answer is kept as it comes: a run that is cut, or ends by ``--minutes``,
goes on where it was. Marks, and how many warm answers differ, are told at the end of each exam and
of the run, also where it is cut.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import httpx

from benchmarks.live_server import LiveServer
from benchmarks.llama_server import LlamaServer
from benchmarks.real_weights.exam_results import COLD, LLAMA_CPP, WARM, Answers, Reply
from benchmarks.real_weights.models import MODELS, fetch
from benchmarks.result import print_result

HUMAN_EVAL = "human_eval"
CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
CONVERSATIONS = "multi_turn_base"
# Where a function of HumanEval has ended.
_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_LENGTH, _TOGETHER, _MOST_STEPS = 8192, 4, 6
# Entries that are asked cold and then warm: a cut loses no more than these, and the cache holds all
# of them.
_IN_TURN = 3 * _TOGETHER


class ContextFullError(Exception):
    """A conversation has grown beyond what the server reads."""


class UnansweredError(Exception):
    """A server gave no answer; the words say why."""


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
    """A server that is examined.

    Args:
        client: Of its server.
        examiner: Marks the answers.
        run: A name of its own for each run: conversations have a world for each.
    """

    def __init__(self, client: httpx.Client, examiner: Examiner, run: str) -> None:
        self._client = client
        self._examiner = examiner
        self._run = run

    def answer(self, exam: str, entry: Mapping[str, Any]) -> Reply:
        """Return the marked answer to an entry."""
        reply = Reply()
        try:
            if exam == HUMAN_EVAL:
                self._write_function(entry, reply)
            elif len(entry["turns"]) > 1:
                self._converse(exam, entry, reply)
            else:
                self._call(exam, entry, reply)
        except ContextFullError:
            reply.said = "the context is full"
        except UnansweredError as error:
            reply.error = str(error)
        return reply

    def _write_function(self, problem: Mapping[str, Any], reply: Reply) -> None:
        body = {"prompt": problem["prompt"], "stop": list(_STOPS), "max_tokens": 384}
        text = self._post("/v1/completions", body, reply)["choices"][0]["text"]
        reply.said = text
        # A stop that begins the answer would leave no function at all.
        reply.is_right = self._examiner.ask("run_program", name=problem["id"], completion=text)

    def _call(self, exam: str, entry: Mapping[str, Any], reply: Reply) -> None:
        message = self._chat(entry["turns"][0], entry["tools"], reply)
        calls = read_calls(message)
        reply.said = [message.get("content"), calls]
        reply.is_right = self._examiner.ask("grade", category=exam, name=entry["id"], calls=calls)

    def _converse(self, exam: str, entry: Mapping[str, Any], reply: Reply) -> None:
        name: dict[str, Any] = {"category": exam, "name": entry["id"], "run": self._run}
        messages: list[dict[str, Any]] = []
        turns: list[list[list[str]]] = []
        reply.said = turns
        for turn in entry["turns"]:
            messages += turn
            turns.append([])
            for _ in range(_MOST_STEPS):
                message = self._chat(messages, entry["tools"], reply)
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
        reply.is_right = self._examiner.ask("grade_turns", **name, turns=turns)

    def _chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], reply: Reply
    ) -> dict[str, Any]:
        body = {"messages": list(messages), "tools": list(tools), "max_tokens": 256}
        told = self._post("/v1/chat/completions", body, reply)
        message: dict[str, Any] = told["choices"][0]["message"]
        return message

    def _post(self, path: str, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        told = self._client.post(path, json={"model": "exam", "temperature": 0, **body})
        if told.status_code == httpx.codes.BAD_REQUEST and "context" in told.text:
            raise ContextFullError
        if told.status_code != httpx.codes.OK:
            raise UnansweredError(f"{path}: {told.status_code} {told.text[:500]}")
        answer: dict[str, Any] = told.json()
        usage = answer["usage"]
        reply.prompt_tokens += usage["prompt_tokens"]
        reply.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return answer


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


class Exams:
    """Entries of all exams, those that are not answered yet, and the time that is left.

    Args:
        answers: Keeps what was answered.
        examiner: Knows the entries.
        counts: How many entries of each exam.
        deadline: No entry is begun behind it; seconds of ``time.monotonic``.
    """

    def __init__(
        self, answers: Answers, examiner: Examiner, counts: Mapping[str, int], deadline: float
    ) -> None:
        self._answers = answers
        self._examiner = examiner
        self._deadline = deadline
        self._entries: dict[str, dict[str, dict[str, Any]]] = {}
        for exam, count in counts.items():
            if exam == HUMAN_EVAL:
                entries = examiner.ask("list_problems", count=count)
            else:
                entries = examiner.ask("list_entries", category=exam, count=count)
            self._entries[exam] = {entry["id"]: entry for entry in entries}

    def has_any(self, run: str) -> bool:
        """Whether an entry has no answer of a run, and there is time for it."""
        return self._has_time() and any(self._list_missing(run, exam) for exam in self._entries)

    def ask(self, client: httpx.Client, runs: Sequence[str]) -> None:
        """Ask what has no answer of the last of the runs, each few entries in every run.

        A repetition is one of an answer by the same process: where it is missing, both are asked.
        """
        candidates = {run: Candidate(client, self._examiner, run) for run in runs}
        for exam in self._entries:
            missing = self._list_missing(runs[-1], exam)
            for at in range(0, len(missing), _IN_TURN):
                if not self._has_time():
                    return
                for run, candidate in candidates.items():
                    self._ask_together(candidate, run, exam, missing[at : at + _IN_TURN])
            if missing:
                told = self._answers.count()
                marks = ", ".join(f"{run} {told[f'{run}_{exam}']}" for run in runs)
                differing = f"{told['warm_answers_that_differ']} warm answers differ"
                print(f"  {exam}: {marks}; {differing}", file=sys.stderr, flush=True)

    def _ask_together(
        self, candidate: Candidate, run: str, exam: str, names: Sequence[str]
    ) -> None:
        pool = ThreadPoolExecutor(_TOGETHER)
        try:
            asked = {
                pool.submit(candidate.answer, exam, self._entries[exam][name]): name
                for name in names
            }
            for done in as_completed(asked):
                self._answers.keep(run, exam, asked[done], done.result())
        finally:
            # Of a run that is cut nothing is awaited: its server ends next.
            pool.shutdown(wait=False, cancel_futures=True)

    def _list_missing(self, run: str, exam: str) -> list[str]:
        return self._answers.list_missing(run, exam, list(self._entries[exam]))

    def _has_time(self) -> bool:
        return time.monotonic() < self._deadline


@contextmanager
def open_own_server(path: Path, inputs: str) -> Iterator[httpx.Client]:
    """Serve a file here while the block runs, which gets a client."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [str(path), "--served-model-name", "exam", "--max-model-len", str(_LENGTH)]
        flags += ["--block-size", "32", "--quantized-inputs", inputs]
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        with (
            LiveServer(Path(folder) / "server.log", *flags) as server,
            httpx.Client(base_url=server.url, timeout=None) as client,
        ):
            yield client


def open_llama_server(path: Path, program: str) -> LlamaServer:
    """Return llama.cpp's server of a file, with this process's processors and as much room."""
    flags = ["-c", str(_LENGTH * _TOGETHER), "-np", str(_TOGETHER), "--jinja"]
    flags += ["-t", str(len(os.sched_getaffinity(0)))]
    return LlamaServer(program, str(path), *flags)


def tell(answers: Answers, config: Mapping[str, Any]) -> bool:
    """Print what is known; return whether each warm answer was the cold one, and none an error."""
    print_result("real_weights_exams", dict(config), answers.count())
    print(answers.write_table(), flush=True)
    differing, errors = answers.list_differing(), answers.list_errors()
    for cold, warm in differing[:5]:
        first, then = (a.reply.error or a.reply.said for a in (cold, warm))
        print(f"{cold.entry}: {first!r} and then {then!r}", file=sys.stderr)
    for answer in errors[:5]:
        print(f"{answer.entry}: {answer.reply.error}", file=sys.stderr)
    return not differing and not errors


def main() -> int:
    """Examine; the exit code is 1 if a warm answer differs from the cold one, or is an error."""
    exams = (HUMAN_EVAL, *CATEGORIES, CONVERSATIONS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_weights.exams")
    parser.add_argument("--model", choices=list(MODELS), default="qwen2.5-coder")
    parser.add_argument("--examiner", metavar="PYTHON", required=True)
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--inputs", choices=["exact", "int16", "int8"], default="exact")
    parser.add_argument("--each", type=int, default=40, help="Entries of each category of BFCL.")
    parser.add_argument("--conversations", type=int, default=10, help="Of its several turns.")
    parser.add_argument("--problems", type=int, default=164, help="Of HumanEval.")
    parser.add_argument("--exams", nargs="+", choices=exams, default=list(exams), metavar="NAME")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="Keeps answers; none of them is asked again."
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="Begin no answer behind these."
    )
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    path = fetch(args.model)
    sizes = {HUMAN_EVAL: args.problems, CONVERSATIONS: args.conversations}
    counts = {exam: sizes.get(exam, args.each) for exam in args.exams}
    answers = Answers(args.results, args.model, args.inputs)
    config = {"file": MODELS[args.model].file, "inputs": args.inputs, "each": args.each}
    # ``timeout`` and the like end a run so: what was answered is told then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        left = Exams(answers, Examiner(args.examiner), counts, deadline)
        if left.has_any(WARM):
            print("here ...", file=sys.stderr, flush=True)
            with open_own_server(path, args.inputs) as client:
                left.ask(client, (COLD, WARM))
        if args.llama_server is not None and left.has_any(LLAMA_CPP):
            print("llama.cpp ...", file=sys.stderr, flush=True)
            with open_llama_server(path, args.llama_server) as client:
                left.ask(client, (LLAMA_CPP,))
    finally:
        is_well = tell(answers, config)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
