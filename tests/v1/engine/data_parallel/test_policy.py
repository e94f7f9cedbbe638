"""The choice of a core, as a function of numbers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.engine.data_parallel.policy import Candidate, choose_core, cost, is_overloaded

MAX_SEQS = 16


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], int]:
    num_tokens = draw(st.integers(1, 5000))
    numbers = st.integers(0, 5000)
    candidates = [
        Candidate(
            rank,
            draw(st.integers(0, num_tokens - 1)),
            draw(st.integers(0, 3 * MAX_SEQS)),
            draw(numbers),
            draw(numbers),
            draw(numbers),
        )
        for rank in range(draw(st.integers(1, 5)))
    ]
    return candidates, num_tokens


@given(situations())
def test_the_chosen_core_is_not_overloaded_and_none_that_is_not_is_cheaper(situation) -> None:
    candidates, num_tokens = situation
    chosen = next(c for c in candidates if c.rank == choose_core(candidates, num_tokens, MAX_SEQS))
    least = min(c.num_requests for c in candidates)
    assert not is_overloaded(chosen, least, MAX_SEQS)
    able = [c for c in candidates if not is_overloaded(c, least, MAX_SEQS)]
    assert cost(chosen, num_tokens) == min(cost(c, num_tokens) for c in able)


@given(situations())
def test_the_imbalance_is_bounded(situation) -> None:
    candidates, num_tokens = situation
    chosen = next(c for c in candidates if c.rank == choose_core(candidates, num_tokens, MAX_SEQS))
    least = min(c.num_requests for c in candidates)
    assert chosen.num_requests < max(least + 8, 2 * least, 1)
    if least < MAX_SEQS:
        assert chosen.num_requests < MAX_SEQS


@given(situations())
def test_with_equal_loads_the_longest_prefix_wins(situation) -> None:
    candidates, num_tokens = situation
    equal = [Candidate(c.rank, c.cached_tokens, 3, 700, 10**6) for c in candidates]
    chosen = choose_core(equal, num_tokens, MAX_SEQS)
    assert equal[chosen].cached_tokens == max(c.cached_tokens for c in equal)


@given(situations(), st.integers(1, 5000))
def test_a_longer_prefix_never_loses_a_core_its_request(situation, more) -> None:
    candidates, num_tokens = situation
    chosen = choose_core(candidates, num_tokens, MAX_SEQS)
    better = [
        replace(c, cached_tokens=min(num_tokens - 1, c.cached_tokens + more))
        if c.rank == chosen
        else c
        for c in candidates
    ]
    assert choose_core(better, num_tokens, MAX_SEQS) == chosen


@given(situations())
def test_the_order_of_the_candidates_does_not_matter(situation) -> None:
    candidates, num_tokens = situation
    chosen = choose_core(candidates, num_tokens, MAX_SEQS)
    assert choose_core(candidates[::-1], num_tokens, MAX_SEQS) == chosen


def test_a_common_beginning_does_not_draw_every_conversation() -> None:
    """A core whose memory is full gives way to one that has room, for a prompt mostly new."""
    full = Candidate(0, cached_tokens=500, unused_tokens=0)
    empty = Candidate(1, unused_tokens=100_000)
    assert choose_core([full, empty], 4000, MAX_SEQS) == 1
    # A conversation's next turn stays.
    assert choose_core([replace(full, cached_tokens=3500), empty], 4000, MAX_SEQS) == 0


def test_siblings_of_a_prompt_in_the_making_stay_together_until_it_costs_more() -> None:
    making = Candidate(0, cached_tokens=999, num_requests=1, backlog_tokens=1000)
    idle = Candidate(1)
    roomy = 10**6
    pair = [replace(making, unused_tokens=roomy), replace(idle, unused_tokens=roomy)]
    assert choose_core(pair, 1000, MAX_SEQS) == 0
    busy = [replace(pair[0], backlog_tokens=9000), pair[1]]
    assert choose_core(busy, 1000, MAX_SEQS) == 1


def test_equal_cores_take_turns_by_what_they_computed() -> None:
    pair = [Candidate(0, placed_tokens=10), Candidate(1, placed_tokens=9)]
    assert choose_core(pair, 100, MAX_SEQS) == 1
