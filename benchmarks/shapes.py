"""Workloads made up by rule: lists of prompts, as ids of equal spans, in the order they come.

Two prompts share the tokens of a span iff they have the same id there. Everything is drawn from a
seed, so a shape is the same on every machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload.

    Attributes:
        num_tokens: Of the prompt.
        span_ids: One per whole span of it, and one for a last, partial span if there is one.
        num_output_tokens: Of the answer.
    """

    num_tokens: int
    span_ids: tuple[int, ...]
    num_output_tokens: int = 1


def rotation(num_prompts: int, num_tokens: int, passes: int, span: int) -> list[Prompt]:
    """Serve the same prompts, nothing shared between them, in the same order, pass after pass."""
    per_prompt = num_tokens // span + 1
    prompts = [
        Prompt(num_tokens, tuple(range(i * per_prompt, (i + 1) * per_prompt)))
        for i in range(num_prompts)
    ]
    return prompts * passes


def returning(
    num_prompts: int, num_tokens: int, kept_share: float, rounds: int, span: int, outputs: int = 1
) -> list[Prompt]:
    """Serve prompts whose beginnings come back every round, each time with another end."""
    fresh = count(1)
    num_spans = -(-num_tokens // span)
    num_kept = int(num_tokens * kept_share) // span
    beginnings = [tuple(next(fresh) for _ in range(num_kept)) for _ in range(num_prompts)]
    prompts = []
    for _ in range(rounds):
        for beginning in beginnings:
            end = tuple(next(fresh) for _ in range(num_spans - num_kept))
            prompts.append(Prompt(num_tokens, beginning + end, outputs))
    return prompts


def prefix_repetition(
    num_prefixes: int, prefix_tokens: int, suffix_tokens: int, num_requests: int, span: int
) -> list[Prompt]:
    """Serve prefixes with different ends, in a shuffled order, each as often as the others."""
    fresh = count(1)
    prefixes = [
        tuple(next(fresh) for _ in range(prefix_tokens // span)) for _ in range(num_prefixes)
    ]
    order = [i % num_prefixes for i in range(num_requests)]
    random.Random(0).shuffle(order)
    num_suffix = -(-suffix_tokens // span)
    return [
        Prompt(
            prefix_tokens + suffix_tokens,
            prefixes[i] + tuple(next(fresh) for _ in range(num_suffix)),
        )
        for i in order
    ]


@dataclass(slots=True)
class _Session:
    """A conversation of an agent: its prompt so far, where its turns ended, turns to come."""

    spans: list[int]
    turn_ends: list[int]
    turns_left: int
    base: int


class AgentTraffic:
    """Prompts of coding agents: long shared beginnings, turns that grow, branches, sub-agents.

        kinds of agent       system prompt and tools, shared by all sessions of the kind
        project              files every session on the project begins with
        turn                 the model's last answer and a tool's result behind the prompt before
        branch               an earlier turn goes on in another way
        sub-agent            a short session of another kind, while its parent waits
        compaction           a full context is replaced by a summary behind the system prompt

    Args:
        seed: Of all draws.
        num_active: Sessions that take turns at any time.
        longest: Tokens at which a context is compacted.
        span: Tokens under one id.
    """

    def __init__(self, seed: int, num_active: int, longest: int, span: int = 128) -> None:
        self._rng = random.Random(seed)
        self._fresh = count(1)
        self._span = span
        self._longest = longest
        self._kinds = [self._new(n) for n in (14_000, 9_500, 18_500)]
        self._helpers = [self._new(n) for n in (4_200, 7_000)]
        # An id stands for all tokens up to there: a project has others behind each kind.
        sizes = [self._rng.randint(1_000, 9_000) for _ in range(6)]
        self._beginnings = [[*kind, *self._new(size)] for kind in self._kinds for size in sizes]
        self._active = [self._open() for _ in range(num_active)]

    def _new(self, num_tokens: float) -> list[int]:
        return [next(self._fresh) for _ in range(max(1, int(num_tokens) // self._span))]

    def _open(self) -> _Session:
        rng = self._rng
        spans = list(rng.choice(self._beginnings))
        # Most sessions are short, some very long.
        turns = max(1, int(rng.lognormvariate(2.6, 1.0)))
        return _Session(spans, [], turns, len(spans))

    def _open_subagent(self) -> _Session:
        spans = list(self._rng.choice(self._helpers))
        return _Session(spans, [], self._rng.randint(2, 9), len(spans))

    def _take_turn(self, session: _Session) -> Prompt:
        rng = self._rng
        if session.turn_ends and rng.random() < 0.04:
            del session.spans[rng.choice(session.turn_ends) :]
            session.turn_ends = [end for end in session.turn_ends if end <= len(session.spans)]
        if len(session.spans) * self._span > self._longest:
            del session.spans[session.base :]
            session.spans += self._new(4_000)
            session.turn_ends = []
        answer, result = rng.lognormvariate(5.6, 0.9), rng.lognormvariate(6.6, 1.2)
        session.spans += self._new(min(answer + result, 16_000))
        session.turn_ends.append(len(session.spans))
        session.turns_left -= 1
        # A token more than whole spans: a next turn resumes at the prompt's end.
        return Prompt(len(session.spans) * self._span + 1, (*session.spans, next(self._fresh)))

    def prompts(self) -> Iterator[Prompt]:
        """Yield prompts without end."""
        rng = self._rng
        while True:
            # The sessions served last are served again soonest.
            at = min(int(rng.expovariate(3.0) * len(self._active)), len(self._active) - 1)
            session = self._active.pop(at)
            for _ in range(1 + int(rng.expovariate(0.5))):
                if session.turns_left <= 0:
                    break
                yield self._take_turn(session)
                if rng.random() < 0.08:
                    helper = self._open_subagent()
                    while helper.turns_left > 0:
                        yield self._take_turn(helper)
            self._active.insert(0, session if session.turns_left > 0 else self._open())
