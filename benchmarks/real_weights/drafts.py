"""Speed of a trained model with looked-up drafts: none, three at a time, and as many as pay.

Edits begin to write a passage of the prompt again, quotes are asked in the midst of other text, and
prose repeats nothing but what its author does. The same four texts of each kind are answered one at
a time and at once. The engines answer in turns, so that they share what else the machine does; a
figure is the least time of the rounds.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

from benchmarks.real_weights.checks import Report, open_engine
from benchmarks.real_weights.progress import tell
from vllm import LLM, SamplingParams

DRAFTERS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "none": None,
        "three": {"method": "ngram", "num_speculative_tokens": 3},
        "weighed": {"method": "ngram"},
    }
)
_ANSWER_TOKENS = 96
_PASSAGE = 1200
# Requests at a time.
_AT_ONCE = (1, 4)
# By how much drafts that are weighed may slow an answer, as least times of a few rounds tell.
_LEAST = 0.95


def check_drafts(path: Path, num_rounds: int) -> Report:
    """Measure each way to draft on each kind of text; the tokens are the same in all.

    Args:
        path: The model's file.
        num_rounds: Times that each arm answers.
    """
    report = Report({})
    with ExitStack() as stack:
        arms = {
            name: stack.enter_context(
                open_engine(path, speculative_config=raw, enable_prefix_caching=True)
            )
            for name, raw in DRAFTERS.items()
        }
        for kind, texts in _draw_texts().items():
            for count in _AT_ONCE:
                groups = [texts[at : at + count] for at in range(0, max(_AT_ONCE), count)]
                _race(arms, f"{kind}_{count}", groups, num_rounds, report)
    return report


def _draw_texts() -> dict[str, list[str]]:
    names = sorted(topics, key=lambda name: -len(topics[name]))
    passages = [topics[name][:_PASSAGE] for name in names]
    return {
        "edit": [f"{text}\n\nOnce more:\n\n{text[:200]}" for text in passages],
        "quote": [
            f"{text}\n\nIt begins like this: {text[:60]}" for text in passages[max(_AT_ONCE) :]
        ],
        "prose": [f"Chapter {i}. It was a bright cold day in spring, and" for i in range(1, 9)],
    }


def _race(
    arms: Mapping[str, LLM],
    title: str,
    groups: Sequence[list[str]],
    num_rounds: int,
    report: Report,
) -> None:
    """Have each arm answer the texts of a group at once, group by group."""
    params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    answers: dict[str, list[list[int]]] = {}
    for turn in range(num_rounds + 1):
        order = list(arms) if turn % 2 else list(arms)[::-1]
        for name in order:
            begin = time.perf_counter()
            outputs = [
                output
                for texts in groups
                for output in arms[name].generate(texts, params, use_tqdm=False)
            ]
            # The first turn fills the caches.
            if turn:
                seconds[name].append(time.perf_counter() - begin)
            answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
    for name in arms:
        if answers[name] != answers["none"]:
            report.faults.append(f"{title}: drafts of {name} change the tokens")
        if name != "none":
            report.figures[f"{title}_{name}"] = min(seconds["none"]) / min(seconds[name])
    tell(f"{title}: {report.figures[f'{title}_weighed']:.2f}")
    if report.figures[f"{title}_weighed"] < _LEAST:
        report.faults.append(f"{title}: drafting makes it slower")
