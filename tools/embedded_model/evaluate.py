"""Asks the embedded model questions through the engine and prints a table of how many it got right.

    python -m tools.embedded_model.evaluate --cases 1000 --lengths 100,1000,4000,12000

Names are held out from training. Cases of one length share documents, so the prefix cache does
most of the reading, as it would in use.
"""

import argparse
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from tools.embedded_model import facts, tasks, words
from tools.embedded_model.conversations import UNKNOWN
from tools.embedded_model.tool_cases import score_texts, tool_cases
from vllm import LLM, SamplingParams
from vllm.tokenizers import Tokenizer

_NEXT = "Next come "
_NUMBER = re.compile(r"\d+")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@dataclass(frozen=True)
class Case:
    """One chat; ``is_right`` judges the answer."""

    messages: list[dict[str, str]]
    wanted: str
    is_right: Callable[[str], bool]


def lookup_document(
    rng: random.Random, tokenizer: Tokenizer, num_tokens: int, chatter: float
) -> tuple[str, list[facts.Fact], list[str]]:
    """A text of about ``num_tokens`` tokens, the facts in it, and names that are not."""
    sentences: list[str] = []
    told: dict[tuple[str, str], facts.Fact] = {}
    pool = words.names(rng, num_tokens // 8 + 12, held_out=True)
    absent = [pool.pop() for _ in range(8)]
    length = 0
    while length < num_tokens - 12:
        if rng.random() < chatter:
            text = facts.chatter(rng)
        else:
            fact = facts.any_fact(rng, pool.pop(), 0.7)
            told[fact.key] = fact
            text = fact.told.replace("|", "")
        sentences.append(text)
        length += len(tokenizer.encode(" " + text, add_special_tokens=False))
    return " ".join(sentences), list(told.values()), absent


def lookups(rng: random.Random, tokenizer: Tokenizer, num_tokens: int, cases: int) -> list[Case]:
    """Questions about access codes and other facts of documents."""
    found: list[Case] = []
    per_document = max(1, min(50, num_tokens // 40))
    while len(found) < cases:
        text, told, _ = lookup_document(rng, tokenizer, num_tokens, 0.25)
        for fact in rng.sample(told, min(per_document, len(told))):
            wanted = fact.answer.replace("|", "")
            messages = [{"role": "user", "content": f"{text} {fact.question}"}]
            found.append(Case(messages, wanted, _says(fact.value)))
    return found[:cases]


def never_told(rng: random.Random, tokenizer: Tokenizer, num_tokens: int, cases: int) -> list[Case]:
    """Questions about names that do not occur."""
    found: list[Case] = []
    while len(found) < cases:
        text, _, absent = lookup_document(rng, tokenizer, num_tokens, 0.25)
        for name in absent:
            question = facts.number_fact(rng, name).question
            messages = [{"role": "user", "content": f"{text} {question}"}]
            found.append(Case(messages, UNKNOWN, _is(UNKNOWN)))
    return found[:cases]


def other_kind(rng: random.Random, tokenizer: Tokenizer, num_tokens: int, cases: int) -> list[Case]:
    """Questions about somebody who occurs, but for a number that was not told."""
    found: list[Case] = []
    while len(found) < cases:
        text, told, _ = lookup_document(rng, tokenizer, num_tokens, 0.25)
        keys = {fact.key for fact in told}
        for fact in rng.sample(told, min(8, len(told))):
            lost = facts.number_fact(rng, fact.key[1])
            if lost.key not in keys:
                messages = [{"role": "user", "content": f"{text} {lost.question}"}]
                found.append(Case(messages, UNKNOWN, _is(UNKNOWN)))
    return found[:cases]


def about_text(rng: random.Random, tokenizer: Tokenizer, num_tokens: int, cases: int) -> list[Case]:
    """What a text says about itself once, somewhere."""
    found: list[Case] = []
    while len(found) < cases:
        about = facts.facts_about_text(rng)
        text, _, _ = lookup_document(rng, tokenizer, num_tokens, 0.7)
        sentences = text.split(". ")
        for fact in about:
            told = fact.told.replace("|", "").removesuffix(".")
            sentences.insert(rng.randrange(len(sentences)), told)
        for fact in about:
            content = f"Read this. {'. '.join(sentences)} {fact.question}"
            messages = [{"role": "user", "content": content}]
            found.append(Case(messages, fact.answer.replace("|", ""), _says(fact.value)))
    return found[:cases]


def short_tasks(rng: random.Random, kind: Callable[[random.Random], tasks.Turn]) -> Case:
    """One short task in a chat of its own."""
    question, reply = kind(rng)
    judge = _is
    if kind is tasks.continue_list:
        judge = _lists
    elif kind is tasks.compare:
        judge = _names_first
    return Case([{"role": "user", "content": question}], reply.text, judge(reply.text))


def rules(rng: random.Random) -> Case:
    """A system prompt's rule."""
    system, turns = tasks.rule(rng)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": turns[0][0]}]
    return Case(messages, turns[0][1].text, _is(turns[0][1].text))


def _says(value: str) -> Callable[[str], bool]:
    return lambda answer: answer.rstrip(".").endswith(" " + value)


def _lists(wanted: str) -> Callable[[str], bool]:
    """Whether an answer's items, whatever leads to them, are the wanted ones."""
    return lambda answer: answer.strip().removeprefix(_NEXT) == wanted.removeprefix(_NEXT)


def _names_first(wanted: str) -> Callable[[str], bool]:
    """Whether the first number of an answer is the wanted one."""
    number = _NUMBER.findall(wanted)[:1]
    return lambda answer: _NUMBER.findall(answer)[:1] == number


def _is(wanted: str) -> Callable[[str], bool]:
    return lambda answer: answer.strip() == wanted


def score(llm: LLM, cases: Sequence[Case], thinking: bool = False) -> dict[str, float]:
    """Answer all cases; returns the share of right ones and of cached prompt tokens."""
    right = prompt = cached = 0
    wrong: list[str] = []
    start = time.monotonic()
    for first in tqdm(range(0, len(cases), 50), disable=None):
        part = cases[first : first + 50]
        outputs = llm.chat(
            [case.messages for case in part],
            GREEDY,
            use_tqdm=False,
            chat_template_kwargs={"thinking": thinking},
        )
        for case, output in zip(part, outputs, strict=True):
            text = output.outputs[0].text.split("</think>")[-1]
            right += case.is_right(text)
            if not case.is_right(text) and len(wrong) < 3:
                wrong.append(f"wanted {case.wanted!r} got {text!r}")
            prompt += len(output.prompt_token_ids or [])
            cached += output.num_cached_tokens or 0
    return {
        "right": right / len(cases),
        "tokens": prompt / len(cases),
        "cached": cached / prompt,
        "seconds": time.monotonic() - start,
        "wrong": wrong,  # type: ignore[dict-item]
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-v4")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--lengths", default="100,300,1000,4000,12000")
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--show", action="store_true", help="print a few wrong answers")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with LLM(arguments.model, block_size=32, use_tqdm_on_load=False) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        rows: list[tuple[str, list[Case], bool]] = []
        for length in (int(text) for text in arguments.lengths.split(",")):
            rng = random.Random(f"{arguments.seed}/{length}")
            rows.append(
                (f"lookup, {length}", lookups(rng, tokenizer, length, arguments.cases), False)
            )
            unknown = never_told(rng, tokenizer, length, max(8, arguments.cases // 5))
            rows.append((f"never told, {length}", unknown, False))
            unknown = other_kind(rng, tokenizer, length, max(8, arguments.cases // 5))
            rows.append((f"other kind told, {length}", unknown, False))
        rng = random.Random(arguments.seed)
        rows.append(
            ("about the text, 1000", about_text(rng, tokenizer, 1000, arguments.cases // 2), False)
        )
        rows.append(
            ("thinking lookup, 300", lookups(rng, tokenizer, 300, arguments.cases // 2), True)
        )
        for kind in dict.fromkeys(tasks.TASKS):
            cases = [short_tasks(rng, kind) for _ in range(arguments.cases // 2)]
            rows.append((kind.__name__.replace("_", " "), cases, False))
        rows.append(("rules", [rules(rng) for _ in range(arguments.cases // 2)], False))
        print(f"{'what':24s} {'cases':>5s} {'right':>7s} {'tokens':>7s} {'cached':>7s} {'s':>6s}")
        for name, cases, thinking in rows:
            result = score(llm, cases, thinking)
            print(
                f"{name:24s} {len(cases):5d} {result['right']:7.1%} {result['tokens']:7.0f} "
                f"{result['cached']:7.1%} {result['seconds']:6.1f}",
                flush=True,
            )
            if arguments.show:
                print("".join(f"    {line}\n" for line in result["wrong"]), end="")  # type: ignore[attr-defined]
        asked, returned = tool_cases(rng, arguments.cases // 2)
        for name, texts in (("tool call", asked), ("answer from the result", returned)):
            share, wrong = score_texts(llm, texts, max_tokens=160)
            print(f"{name:24s} {len(texts):5d} {share:7.1%}", flush=True)
            if arguments.show:
                print("".join(f"    {line}\n" for line in wrong), end="")


if __name__ == "__main__":
    main()
