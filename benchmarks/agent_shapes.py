"""Workloads of agents and applications, made up by rule; no threshold was chosen on them.

Prompts are built of pieces; two prompts share a piece iff all pieces before it are the same, too.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from benchmarks.shapes import Prompt

Piece = tuple[int, int]
"""What a piece is, and its tokens."""
SPAN = 128
"""Tokens under one id."""


class PrefixIds:
    """Gives equal prefixes equal ids.

    Owns: the ids given so far.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int, int], int] = {}
        self._pieces = count(1)

    def new(self, num_tokens: int) -> Piece:
        """Return a piece that no other prompt has."""
        return next(self._pieces), num_tokens

    def prompt(self, pieces: Sequence[Piece], num_output_tokens: int = 1) -> Prompt:
        """Return the prompt of some pieces; a span belongs to the piece that it ends in."""
        spans: list[int] = []
        parent, end = 0, 0
        for name, num_tokens in pieces:
            start, end = end, end + num_tokens
            for number in range(start // SPAN, end // SPAN):
                key = (parent, name, number)
                parent = self._ids.setdefault(key, len(self._ids) + 1)
                spans.append(parent)
        if end % SPAN:
            spans.append(self._ids.setdefault((parent, 0, -len(self._ids)), len(self._ids) + 1))
        return Prompt(end, tuple(spans), num_output_tokens)


def tool_loops(seed: int, num_prompts: int) -> Iterator[Prompt]:
    """Agents that call tools and try alternatives: a tree of turns per task, several at a time.

    system 11k or 6k | task | call, result | call, result ...
                                   `-- alternative, 2 to 4 turns long, from the same place
    """
    rng, ids = random.Random(seed), PrefixIds()
    systems = [ids.new(11_300), ids.new(6_100)]

    def task() -> Iterator[list[Piece]]:
        trunk = [rng.choice(systems), ids.new(rng.randint(150, 2500))]
        for _ in range(rng.randint(4, 25)):
            trunk = [*trunk, ids.new(rng.randint(40, 400) + int(rng.lognormvariate(6.3, 1.1)))]
            yield trunk
            if rng.random() < 0.15:
                for _ in range(rng.randint(2, 3)):
                    branch = trunk
                    for _ in range(rng.randint(2, 4)):
                        branch = [*branch, ids.new(int(rng.lognormvariate(6.3, 1.0)) + 60)]
                        yield branch

    active = [task() for _ in range(20)]
    for _ in range(num_prompts):
        place = rng.randrange(len(active))
        pieces = next(active[place], None)
        while pieces is None:
            active[place] = task()
            pieces = next(active[place], None)
        yield ids.prompt(pieces)


def user_suffixes(seed: int, num_prompts: int) -> Iterator[Prompt]:
    """Long system prompts, a profile per user behind them, a question that never comes again."""
    rng, ids = random.Random(seed), PrefixIds()
    systems = [ids.new(n) for n in (23_700, 14_900, 8_200, 5_500)]
    users = [(rng.choice(systems), ids.new(rng.randint(400, 2300))) for _ in range(400)]
    weights = [1 / (rank + 3) for rank in range(len(users))]
    for _ in range(num_prompts):
        system, profile = rng.choices(users, weights)[0]
        yield ids.prompt([system, profile, ids.new(rng.randint(30, 700))])


def shuffled_documents(seed: int, num_prompts: int) -> Iterator[Prompt]:
    """Retrieval: a system prompt, five documents in any order, a question."""
    rng, ids = random.Random(seed), PrefixIds()
    system = ids.new(1_900)
    documents = [ids.new(rng.randint(700, 3100)) for _ in range(300)]
    weights = [1 / (rank + 2) ** 1.1 for rank in range(len(documents))]
    for _ in range(num_prompts):
        chosen: dict[Piece, None] = {}
        while len(chosen) < 5:
            chosen[rng.choices(documents, weights)[0]] = None
        order = list(chosen)
        rng.shuffle(order)
        yield ids.prompt([system, *order, ids.new(rng.randint(30, 400))])


def bursts(seed: int, num_prompts: int) -> Iterator[Prompt]:
    """Batches over a long text each; now and then one of the earlier texts comes back."""
    rng, ids = random.Random(seed), PrefixIds()
    known: list[Piece] = []
    made = 0
    while made < num_prompts:
        if known and rng.random() < 0.3:
            text = rng.choice(known[-12:])
        else:
            text = ids.new(rng.randint(6_000, 30_000))
            known.append(text)
        for _ in range(min(rng.randint(5, 40), num_prompts - made)):
            made += 1
            yield ids.prompt([text, ids.new(rng.randint(60, 900))])


SHAPES: dict[str, Callable[[int, int], Iterator[Prompt]]] = {
    "tool_loops": tool_loops,
    "user_suffixes": user_suffixes,
    "shuffled_documents": shuffled_documents,
    "bursts": bursts,
}
