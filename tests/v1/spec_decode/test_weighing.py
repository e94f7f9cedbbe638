"""Drafting decides by itself: against no drafts and every fixed number, on a clock of its own."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from vllm.v1.spec_decode.ngram import NgramProposer, WeighedNgramProposer
from vllm.v1.spec_decode.weighing import Agreement, Chance, Draft, DraftWeigher, StepCosts

Cost = Callable[[int], float]
PROMPT = 200

# Seconds by rows. Weights read once for all rows; arithmetic alone; a kernel of four rows at once.
COSTS: dict[str, Cost] = {
    "memory": lambda rows: 1.0 + 0.02 * rows,
    "arithmetic": lambda rows: 0.1 + rows,
    "tiles of four": lambda rows: 1.0 + 0.6 * ((rows - 1) // 4) + 0.02 * rows,
    "between": lambda rows: 1.0 + 0.25 * rows,
}


def random_text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(500) for _ in range(count)]


def edited_text(rng: random.Random) -> list[int]:
    """A prompt, and an answer that repeats it but for one token in twenty."""
    prompt = random_text(rng, PROMPT)
    answer = [t if rng.random() < 0.95 else rng.randrange(500) for t in prompt]
    return prompt + answer


def prose(rng: random.Random) -> list[int]:
    """A text over few words, which repeats pairs by chance."""
    return [min(int(rng.expovariate(0.08)), 60) for _ in range(3 * PROMPT)]


TEXTS: dict[str, Callable[[random.Random], list[int]]] = {
    "edit": edited_text,
    "prose": prose,
    "nothing twice": lambda rng: list(range(2 * PROMPT)),
    "quotes": lambda rng: random_text(rng, PROMPT) + edited_text(rng)[PROMPT - 60 :],
}


@dataclass
class _State:
    req_id: str
    tokens: np.ndarray
    num_tokens: int
    text_owner: None = None

    def get_tokens(self, start: int, end: int) -> np.ndarray:
        return self.tokens[start:end]


@dataclass
class _Step:
    requests: list[_State]
    sampled_counts: list[int]
    sampled_rows: list[int]
    num_tokens: int


class Run:
    """Requests whose texts are known, decoded together."""

    def __init__(self, texts: list[list[int]], cost: Cost, noise: float = 0.0) -> None:
        self.states = [_State(str(i), np.array(t), PROMPT) for i, t in enumerate(texts)]
        self.cost, self.noise = cost, noise
        self.rng = random.Random(5)
        # What the clock says, and what the steps alone take.
        self.now = self.alone = 0.0
        self.disturb: Callable[[], float] = lambda: 1.0
        self.drafted: list[int] = []

    def finish(self, propose: Callable[[_Step], list[list[int]]]) -> float:
        """Return the seconds that steps take until all texts are said."""
        drafts: dict[str, list[int]] = {}
        live = list(self.states)
        while live:
            counts = [1 + len(drafts.get(state.req_id, ())) for state in live]
            num_rows = sum(counts)
            seconds = self.cost(num_rows) * (1 + self.rng.random() * self.noise)
            self.alone += seconds
            self.now += seconds * self.disturb()
            self.drafted.append(num_rows - len(live))
            for state in live:
                draft, at = drafts.get(state.req_id, []), state.num_tokens
                right = 0
                while right < len(draft) and list(state.tokens[at + right : at + right + 1]) == [
                    draft[right]
                ]:
                    right += 1
                state.num_tokens = min(at + right + 1, len(state.tokens))
            step = _Step(live, counts, [*range(num_rows)], num_rows)
            told = propose(step)
            drafts = {s.req_id: draft for s, draft in zip(live, told, strict=True)}
            live = [state for state in live if state.num_tokens < len(state.tokens)]
        return self.alone


def seconds_with(texts: list[list[int]], cost: Cost, num_drafts: int, noise: float = 0.0) -> float:
    lookup = NgramProposer(max(1, num_drafts), 2, 8)

    def propose(step: _Step) -> list[list[int]]:
        if not num_drafts:
            return [[] for _ in step.requests]
        return [lookup.find(s.tokens[: s.num_tokens]) for s in step.requests]

    return Run(texts, cost, noise).finish(propose)


def weighed(
    texts: list[list[int]],
    cost: Cost,
    noise: float = 0.0,
    disturb: Callable[[], float] = lambda: 1.0,
) -> tuple[float, list[int]]:
    run = Run(texts, cost, noise)
    run.disturb = disturb
    proposer = WeighedNgramProposer(NgramProposer(8, 1, 8), clock=lambda: run.now)

    def propose(step: _Step) -> list[list[int]]:
        return proposer.propose(cast(Any, step), torch.empty(0), {})

    return run.finish(propose), run.drafted


@pytest.mark.parametrize("num_requests", [1, 2, 4])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_never_slower_than_no_drafts_and_near_the_best_number(
    cost: str, text: str, num_requests: int
) -> None:
    rng = random.Random(f"{cost} {text} {num_requests}")
    texts = [TEXTS[text](rng) for _ in range(num_requests)]
    seconds, _ = weighed(texts, COSTS[cost])
    fixed = {k: seconds_with(texts, COSTS[cost], k) for k in (0, 1, 3, 8)}
    assert seconds <= fixed[0] / 0.98, fixed
    # It learns while it runs, and is not told which number is best.
    assert seconds <= 1.2 * min(fixed.values()), fixed


def test_one_that_repeats_itself_does_not_slow_down_one_that_does_not() -> None:
    """All wait for a step's rows: the other would end later, alone."""
    for name in ("between", "arithmetic"):
        texts = [edited_text(random.Random(1)), TEXTS["nothing twice"](random.Random(1))]
        seconds, _ = weighed(texts, COSTS[name])
        assert seconds <= seconds_with(texts, COSTS[name], 0) / 0.98


def test_more_requests_than_wanted_draft_nothing() -> None:
    texts = [edited_text(random.Random(i)) for i in range(3)]
    texts[2] = texts[2][: PROMPT + 20]
    run = Run(texts, COSTS["memory"])
    proposer = WeighedNgramProposer(NgramProposer(8, 1, 8), lambda: run.now, most_requests=2)

    def propose(step: _Step) -> list[list[int]]:
        return proposer.propose(cast(Any, step), torch.empty(0), {})

    run.finish(propose)
    assert not any(run.drafted[:20])
    assert any(run.drafted[20:])
    # What passed without a look is no step's time.
    costs = proposer._weigher.costs
    assert not costs.knows(3)
    assert costs.estimate(2) == pytest.approx(COSTS["memory"](2), rel=0.05)


def test_looks_that_do_not_pay_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes a fifth of a step, as with a tiny model."""
    match, looks = NgramProposer.match, []

    def run_dearly(text: list[int]) -> tuple[float, list[int]]:
        run = Run([text], COSTS["between"])
        looks.clear()

        def look(self: NgramProposer, tokens: np.ndarray) -> Draft:
            looks.append(len(tokens))
            run.now += 0.2
            return match(self, tokens)

        monkeypatch.setattr(NgramProposer, "match", look)
        proposer = WeighedNgramProposer(NgramProposer(8, 1, 8), clock=lambda: run.now)

        def propose(step: _Step) -> list[list[int]]:
            return proposer.propose(cast(Any, step), torch.empty(0), {})

        run.finish(propose)
        return run.now, run.drafted

    rng = random.Random(7)
    for text in (list(range(2 * PROMPT)), prose(rng)):
        seconds, drafted = run_dearly(text)
        assert seconds < 1.06 * seconds_with([text], COSTS["between"], 0)
        assert len(looks) < len(drafted) / 4
    # What begins to repeat itself is seen all the same.
    quoted = random_text(rng, PROMPT)
    _, drafted = run_dearly([*quoted, *range(1000, 1000 + PROMPT), *quoted])
    assert not any(drafted[:PROMPT])
    assert len(drafted) < 1.6 * PROMPT


def test_edits_where_rows_are_cheap_are_far_faster() -> None:
    text = edited_text(random.Random(1))
    alone = seconds_with([text], COSTS["tiles of four"], 0)
    seconds, drafted = weighed([text], COSTS["tiles of four"])
    assert alone / seconds > 1.4
    assert max(drafted) > 2


def test_a_noisy_clock_makes_it_no_slower() -> None:
    for text in ("edit", "prose"):
        texts = [TEXTS[text](random.Random(2))]
        for cost in COSTS.values():
            seconds, _ = weighed(texts, cost, noise=0.5)
            assert seconds <= seconds_with(texts, cost, 0, noise=0.5) / 0.96


def test_a_text_that_begins_to_repeat_itself_is_drafted_without_trying() -> None:
    """What would have been right is seen while nothing is drafted."""
    rng = random.Random(3)
    quoted = random_text(rng, PROMPT)
    text = quoted + prose(rng) + quoted
    _, drafted = weighed([text], COSTS["between"])
    num_steps = len(drafted)
    assert sum(drafted[: num_steps // 2]) < sum(drafted[num_steps // 2 :])
    assert drafted[-1] > 1


def test_a_passage_goes_on_behind_a_token_that_was_replaced() -> None:
    passage = list(range(PROMPT))
    edited = [token if token % 8 else 1000 + token for token in passage]
    seconds, drafted = weighed([passage + edited], COSTS["memory"])
    # Lookups alone find the passage again two tokens later: two steps in three draft nothing.
    assert drafted.count(0) < len(drafted) / 4
    assert seconds < seconds_with([passage + edited], COSTS["memory"], 8)


def test_a_passage_that_is_lost_keeps_no_other_from_being_looked_up() -> None:
    rng = random.Random(3)
    idioms = [list(range(1000 + 7 * i, 1004 + 7 * i)) for i in range(30)]
    text = [token for _ in range(PROMPT) for token in rng.choice(idioms)]
    seconds, _ = weighed([text], COSTS["memory"])
    assert seconds < 1.1 * seconds_with([text], COSTS["memory"], 8)


def test_a_single_token_that_foretells_the_next_is_enough() -> None:
    rng = random.Random(4)
    pairs = [[1000 + i, 2000 + i] for i in range(8)]
    # What stands before a pair is never the same.
    text = [token for i in range(3 * PROMPT) for token in (3000 + i, *rng.choice(pairs))]
    _, drafted = weighed([text[: 3 * PROMPT]], COSTS["memory"])
    assert sum(map(bool, drafted)) > len(drafted) / 3


def test_places_that_go_on_alike_are_surer_than_others() -> None:
    weigher = DraftWeigher()
    for name, agreement in (("alike", Agreement.ALL), ("divided", Agreement.NONE)):
        for _ in range(20):
            weigher.choose({name: Draft([1], 2, agreement=agreement)}, {name: 1})
            weigher.note_texts({name: [0, 1 if name == "alike" else 2]})
    kinds = [Draft([1], 2, agreement=agreement).kind_of(0) for agreement in Agreement]
    assert weigher._chance_of(kinds[Agreement.ALL]).value > 0.9
    assert weigher._chance_of(kinds[Agreement.NONE]).value < 0.1
    long = {Draft([1], 6, agreement=agreement).kind_of(0) for agreement in Agreement}
    assert len(long) == 1


def test_long_matches_are_surer_before_anything_was_seen() -> None:
    weigher = DraftWeigher()
    values = [weigher._chance_of(Draft([1], n).kind_of(0)).value for n in (1, 2, 3, 4, 7, 30)]
    assert values == sorted(values)
    assert values[0] < 0.5 < values[-1]


def test_costs_are_drawn_through_what_was_measured() -> None:
    costs = StepCosts()
    costs.note(2, 1.0)
    costs.note(6, 2.0)
    assert costs.estimate(4) == pytest.approx(1.5)
    assert costs.estimate(10) == pytest.approx(3.0)
    assert 0 < costs.estimate(1) < 1.0
    # A pause of the machine is no cost.
    costs.note(2, 1000.0)
    assert costs.estimate(2) < 1.5
    for _ in range(100):
        costs.note(2, 3.0)
    assert costs.estimate(2) == pytest.approx(3.0, rel=0.01)
    # More rows never cost less.
    assert costs.estimate(4) >= costs.estimate(2)


def test_what_was_slow_once_is_not_taken_for_slow_for_ever() -> None:
    costs = StepCosts()
    for rows in (1, 2, 4):
        costs.note(rows, 1.0 + 0.1 * rows)
    # The machine did something else when five rows were tried first.
    costs.note(5, 4.0)
    slow = costs.estimate(5)
    for _ in range(100):
        for rows in (1, 2, 4):
            costs.note(rows, 1.0 + 0.1 * rows)
    assert costs.estimate(5) == pytest.approx(1.5, rel=0.02) != slow
    # What was often measured stays known: kernels take rows in tiles.
    for _ in range(10):
        costs.note(9, 5.0)
    assert costs.estimate(9) > 4.0


def test_a_machine_that_others_share_does_not_change_what_pays() -> None:
    """Steps take up to three times as long, half of them; the time they would take alone counts."""
    rng = random.Random(6)
    for name in ("memory", "between"):
        texts = [edited_text(random.Random(i)) for i in range(3)]
        alone, shared = 0.0, 0.0
        for text in texts:
            alone += weighed([text], COSTS[name])[0]
            shared += weighed([text], COSTS[name], disturb=lambda: 1 + rng.choice([0, 2]))[0]
        assert shared < 1.15 * alone, name


def test_a_chance_forgets_old_texts() -> None:
    chance = Chance()
    for _ in range(100):
        chance.note(24, is_right=True)
    assert chance.value > 0.95
    for _ in range(60):
        chance.note(24, is_right=False)
    assert chance.value < 0.1


def test_what_a_step_costs_without_drafts_is_measured_again_and_again() -> None:
    weigher = DraftWeigher()
    for rows in (1, 2, 9):
        weigher.costs.note(rows, 1.0 + 0.01 * rows)
    counts = []
    tokens = [0]
    for _ in range(1200):
        weigher.note_texts({"a": tokens})
        counts.append(weigher.choose({"a": Draft([1] * 8, 4)}, {"a": len(tokens)})["a"])
        tokens = [*tokens, *[1] * (counts[-1] + 1)]
    measured = [step for step, count in enumerate(counts) if not count]
    pauses = [after - before - 1 for before, after in pairwise([-1, *measured])]
    # At first one measurement may be wrong; later they cost next to nothing.
    assert pauses == [4, 8, 16, 32, 64, 128, 256, 256, 256]
    assert counts[-1] == 8


def test_requests_that_are_gone_are_forgotten() -> None:
    weigher = DraftWeigher()
    weigher.choose({"a": Draft([1], 2)}, {"a": 5})
    weigher.note_texts({"b": [1, 2]})
    assert not weigher._foretold


def test_a_passage_ends_at_a_token_that_was_not_drafted_as_well() -> None:
    """The model adds a token to those drafted: it may be another than the passage has."""
    passage = list(range(10, 22))
    for added, match in ((passage[4], 5), (99, 0)):
        weigher = DraftWeigher()
        text = [*passage, passage[0]]
        weigher.choose({"a": Draft(tuple(passage[1:4]), 2, 1)}, {"a": len(text)})
        found = weigher.note_texts({"a": [*text, *passage[1:4], added]})["a"]
        assert (found.start, found.match) == (5, match)
