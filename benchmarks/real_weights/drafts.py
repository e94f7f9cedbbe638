"""Speed of a trained model with looked-up drafts: none, three at a time, and as many as pay.

Edits begin to write a passage of the prompt again, quotes are asked in the midst of other text, and
prose repeats nothing but what its author does. Of these no engine has seen an answer; what is asked
again has one. The same four texts of each kind are answered one at a time, two at a time and at
once. The engines answer each text in turns, so that they share what else the machine does. Time is
taken by the clock and by the processor, since either may be another program's doing: a figure is
the sum of each text's least.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from benchmarks.real_weights.checks import Report, open_engine
from benchmarks.real_weights.progress import tell
from vllm import LLM, SamplingParams

DRAFTERS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "none": {"method": "none"},
        "three": {"method": "ngram", "num_speculative_tokens": 3},
        "weighed": {"method": "ngram"},
    }
)
_ANSWER_TOKENS = 96
# What was answered before under the same salt.
_AGAIN = "again"
_PASSAGE = 1200
# Requests at a time.
_AT_ONCE = (1, 2, 4)
# By how much drafts that are weighed may slow an answer.
_LEAST = 0.98
# What looks slower is asked so many times more: time that others take only ever adds up.
_MORE_ROUNDS = 6


def check_drafts(path: Path, num_rounds: int) -> Report:
    """Measure each way to draft on each kind of text; the tokens are the same in all.

    Args:
        path: The model's file.
        num_rounds: Times that each arm answers.
    """
    report = Report({})
    with ExitStack() as stack:
        # Processor time is that of this process.
        stack.enter_context(patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0"))
        arms = {
            name: stack.enter_context(
                open_engine(path, speculative_config=raw, enable_prefix_caching=True)
            )
            for name, raw in DRAFTERS.items()
        }
        for kind, texts in _draw_texts().items():
            num_before = _ANSWER_TOKENS if kind == _AGAIN else 1
            for count in _AT_ONCE:
                groups = [texts[at : at + count] for at in range(0, max(_AT_ONCE), count)]
                _race(arms, f"{kind}_{count}", groups, num_rounds, num_before, report)
    return report


def _draw_texts() -> dict[str, list[str]]:
    """Return the texts by kind."""
    names = sorted(topics, key=lambda name: -len(topics[name]))
    passages = [topics[name][:_PASSAGE] for name in names]
    return {
        "edit": [f"{text}\n\nOnce more:\n\n{text[:200]}" for text in passages],
        "quote": [
            f"{text}\n\nIt begins like this: {text[:60]}" for text in passages[max(_AT_ONCE) :]
        ],
        "prose": [f"Chapter {i}. It was a bright cold day in spring, and" for i in range(1, 9)],
        _AGAIN: [f"{text}\n\nIn other words," for text in passages],
    }


@dataclass
class _Times:
    """The least seconds of each group by arm, by one clock.

    Owns: them.
    """

    least: dict[tuple[str, int], float] = field(default_factory=dict)

    def note(self, arm: str, group: int, seconds: float) -> None:
        key = arm, group
        self.least[key] = min(seconds, self.least.get(key, seconds))

    def gain(self, arm: str) -> float:
        """How many times as fast as without drafts."""
        none, other = (
            sum(seconds for (name, _), seconds in self.least.items() if name == each)
            for each in ("none", arm)
        )
        return none / other


def _race(
    arms: Mapping[str, LLM],
    title: str,
    groups: Sequence[list[str]],
    num_rounds: int,
    num_before: int,
    report: Report,
) -> None:
    """Have each arm answer the texts of a group at once, group by group.

    Each turn has a salt of its own, under which so many tokens are answered before: the prompt is
    cached then, and where that is one token, nothing else is known of the answer.
    """
    wall, processor = _Times(), _Times()
    answers: dict[tuple[str, int], list[list[int]]] = {}
    for turn in range(num_rounds + _MORE_ROUNDS + 1):
        order = list(arms) if turn % 2 else list(arms)[::-1]
        for group, texts in enumerate(groups):
            for name in order:
                salt = f"{title}-{turn}"
                _answer(arms[name], texts, salt, num_before)
                begin, own = time.perf_counter(), time.process_time()
                answer = _answer(arms[name], texts, salt)
                # The first turn learns what steps take.
                if turn:
                    wall.note(name, group, time.perf_counter() - begin)
                    processor.note(name, group, time.process_time() - own)
                if answers.setdefault((name, group), answer) != answer:
                    report.faults.append(f"{title}: {name} gives other tokens in turn {turn}")
        if turn >= num_rounds and max(t.gain("weighed") for t in (wall, processor)) >= _LEAST:
            break
    for name in arms:
        if any(answers[name, group] != answers["none", group] for group in range(len(groups))):
            report.faults.append(f"{title}: drafts of {name} change the tokens")
        if name != "none":
            report.figures[f"{title}_{name}"] = wall.gain(name)
            report.figures[f"{title}_{name}_processor"] = processor.gain(name)
    gains = wall.gain("weighed"), processor.gain("weighed")
    tell(f"{title}: {gains[0]:.2f}, by processor time {gains[1]:.2f}")
    if max(gains) < _LEAST:
        report.faults.append(f"{title}: drafting makes it slower")


def _answer(
    engine: LLM, texts: list[str], salt: str, num_tokens: int = _ANSWER_TOKENS
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [{"prompt": text, "cache_salt": salt} for text in texts]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
