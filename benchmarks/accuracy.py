"""Does the prefix cache change an answer? Questions to servers with and without it.

    python -m benchmarks.accuracy [--cases 100] [--servers none cache cache+mtp disaggregated]
        [--lm-eval PYTHON]

Starts the servers of the embedded model one after the other and asks each the same questions, 8 at
a time, twice over: facts told in documents of 1,000 and 4,000 tokens, facts that were not told,
short tasks, and a few-shot task whose prompts share their examples. ``none`` has no
prefix cache; ``cache`` hits, and more the second time; ``cache+mtp`` drafts too; ``disaggregated``
is a prefill server, a decode server and the example's proxy. Says how many answers are right, how
many differ from the first server's to the letter, and how many prompt tokens came from a cache.
Prints a table and one JSON line; a differing answer ends it with an error.

``--lm-eval PYTHON``: an interpreter that has lm-eval (0.4 or later, with its API models); the
few-shot task is then also run by it against each server, as a local task.
"""

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.disaggregated import free_port, start_proxy, transfer_flags
from benchmarks.live_server import LiveServer
from benchmarks.result import print_result
from tools.embedded_model import facts, tasks, words
from tools.embedded_model.evaluate import Case, lookups, never_told, short_tasks
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer

_BASE = ("deepseek-v4", "--block-size", "32")
_MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
_NUM_SHOTS = 5
_FEW_SHOT = f"{_NUM_SHOTS}-shot"
_NUM_AT_ONCE = 8
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Question:
    """One request, and how to judge its answer.

    Attributes:
        kind: Row of the table.
        body: What is sent.
        wanted: Its answer in full.
        is_right: Judges the answer's text.
    """

    kind: str
    body: dict[str, Any]
    wanted: str
    is_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        text: The answer.
        num_prompt_tokens: Of its prompt.
        num_cached_tokens: Of these, from a cache.
    """

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int


def make_questions(num_cases: int, seed: int) -> list[Question]:
    """Return questions of every kind, ``num_cases`` of each."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_folder(resolve_checkpoint("deepseek-v4").path)
    chats: dict[str, list[Case]] = {
        "told, 1,000 tokens": lookups(rng, tokenizer, 1000, num_cases),
        "told, 4,000 tokens": lookups(rng, tokenizer, 4000, num_cases),
        "not told, 1,000 tokens": never_told(rng, tokenizer, 1000, num_cases),
    }
    kinds = list(dict.fromkeys(tasks.TASKS))
    chats["short tasks"] = [short_tasks(rng, kinds[i % len(kinds)]) for i in range(num_cases)]
    made = [
        Question(kind, _chat(case.messages), case.wanted, case.is_right)
        for kind, cases in chats.items()
        for case in cases
    ]
    return made + [few_shot(rng, shots) for shots in _shots(num_cases)]


def _chat(messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "reasoning_effort": "none"}
    return {**body, "temperature": 0, "max_tokens": 40}


def _shots(num_cases: int) -> Iterator[str]:
    """Yield the examples of each few-shot question: one set for every ten of them."""
    for number in range(num_cases):
        rng = random.Random(f"shots/{number // 10}")
        shots = (_example(rng) for _ in range(_NUM_SHOTS))
        yield "".join(f"{asked} {answer}\n" for asked, answer, _ in shots)


def _example(rng: random.Random) -> tuple[str, str, str]:
    """Return an example without its answer, the answer, and the value in it."""
    fact = facts.any_fact(rng, words.names(rng, 1, held_out=True)[0], 0.7)
    told, answer = fact.told.replace("|", ""), fact.answer.replace("|", "")
    return f"{told} {facts.chatter(rng)} {fact.question}", answer, fact.value


def few_shot(rng: random.Random, shots: str) -> Question:
    """Return a question behind examples; right if the answer names the value."""
    asked, answer, value = _example(rng)
    body = _chat([{"role": "user", "content": shots + asked}])
    return Question(_FEW_SHOT, body, answer, lambda text: value in text)


@contextmanager
def serve(name: str, folder: Path) -> Iterator[str]:
    """Run the servers of one row; yields the URL to ask.

    Raises:
        RuntimeError: One did not start.
    """
    details = ("--enable-prompt-tokens-details",)
    with ExitStack() as stack:

        def start(log: str, *flags: str) -> LiveServer:
            path = folder / f"{name.replace('+', '_')}_{log}.txt"
            return stack.enter_context(LiveServer(path, *_BASE, *details, *flags))

        if name == "none":
            yield start("server", "--no-enable-prefix-caching").url
        elif name == "cache":
            yield start("server").url
        elif name == "cache+mtp":
            yield start("server", *_MTP).url
        else:
            kv_port = free_port()
            prefill = start("prefill", *transfer_flags("kv_producer", kv_port))
            decode = start("decode", *transfer_flags("kv_consumer", kv_port))
            yield start_proxy(stack, prefill.url, decode.url)


SERVERS = ("none", "cache", "cache+mtp", "disaggregated")


def ask_all(url: str, questions: Sequence[Question], label: str) -> list[Answer]:
    """Ask everything, eight at a time; answers in the questions' order.

    Raises:
        httpx.HTTPStatusError: A request was refused.
    """
    with httpx.Client(timeout=_TIMEOUT_S) as client, ThreadPoolExecutor(_NUM_AT_ONCE) as pool:

        def ask(question: Question) -> Answer:
            reply = client.post(f"{url}/v1/chat/completions", json=question.body)
            reply.raise_for_status()
            body = reply.json()
            choice, usage = body["choices"][0], body["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return Answer(choice["message"]["content"] or "", usage["prompt_tokens"], cached)

        done = pool.map(ask, questions)
        return list(tqdm(done, label, total=len(questions), mininterval=5))


def run_lm_eval(python: str, url: str, questions: Sequence[Question], folder: Path) -> float:
    """Run the few-shot questions as a local task of lm-eval; returns the share it finds right.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    task = folder / "task"
    task.mkdir(parents=True)
    shots = [q for q in questions if q.kind == _FEW_SHOT]
    lines = [
        json.dumps({"asked": q.body["messages"][0]["content"], "answer": q.wanted}) for q in shots
    ]
    (task / "questions.jsonl").write_text("\n".join(lines) + "\n")
    (task / "told.yaml").write_text(_TASK.format(path=json.dumps(str(task / "questions.jsonl"))))
    arguments = f"model=deepseek-v4,base_url={url}/v1/chat/completions,num_concurrent=4"
    command = [python, "-m", "lm_eval", "--model", "local-chat-completions", "--tasks", "told"]
    command += ["--apply_chat_template"]
    command += ["--include_path", str(task), "--model_args", arguments, "--output_path", str(task)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = max(task.rglob("results*.json"), key=lambda path: path.stat().st_mtime)
    scores = json.loads(found.read_text())["results"]["told"]
    return float(scores["exact_match,none"])


_TASK = """task: told
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_text: "{{{{asked}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 40
  reasoning_effort: none
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Ask every server, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, help="Of each kind.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--lm-eval", metavar="PYTHON", help="An interpreter that has lm-eval.")
    args = parser.parse_args(argv)
    questions = make_questions(args.cases, args.seed)
    rounds: dict[str, list[list[Answer]]] = {}
    found_by_lm_eval: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.servers:
            with serve(name, Path(folder)) as url:
                rounds[name] = [ask_all(url, questions, f"{name}, {i}") for i in (1, 2)]
                if args.lm_eval is not None:
                    place = Path(folder) / f"lm_eval_{len(rounds)}"
                    found_by_lm_eval[name] = run_lm_eval(args.lm_eval, url, questions, place)
    values = compare(questions, rounds)
    print_table(values)
    for name, share in found_by_lm_eval.items():
        print(f"`{name}` by lm-eval, {_NUM_SHOTS}-shot, exact match: {share:.1%}")
    print_result("accuracy", vars(args), {**values, "lm_eval": found_by_lm_eval})
    differ = any(row["different"] for rows in values.values() for row in rows.values())
    if differ or len(set(found_by_lm_eval.values())) > 1:
        raise SystemExit("Answers differ from the first server's.")


def compare(
    questions: Sequence[Question], rounds: dict[str, list[list[Answer]]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by server and kind: right answers, those unlike the first server's, cached share."""
    first = next(iter(rounds.values()))[0]
    values: dict[str, dict[str, dict[str, float]]] = {}
    for name, asked in rounds.items():
        rows = values.setdefault(name, {})
        for kind in dict.fromkeys(question.kind for question in questions):
            at = [i for i, question in enumerate(questions) if question.kind == kind]
            answers = [(i, answers[i]) for answers in asked for i in at]
            prompt = sum(answer.num_prompt_tokens for _, answer in answers)
            rows[kind] = {
                "asked": len(answers),
                "right": sum(questions[i].is_right(answer.text) for i, answer in answers),
                "different": sum(answer.text != first[i].text for i, answer in answers),
                "cached": sum(answer.num_cached_tokens for _, answer in answers) / prompt,
            }
    return values


def print_table(values: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a row for each server and kind."""
    print("| server | questions | asked | right | other than the first server's | cached |")
    print("|---|---|--:|--:|--:|--:|")
    for name, rows in values.items():
        for kind, row in rows.items():
            print(
                f"| `{name}` | {kind} | {row['asked']:,} | {row['right'] / row['asked']:.1%} "
                f"| {row['different']} | {row['cached']:.1%} |"
            )


if __name__ == "__main__":
    main()
