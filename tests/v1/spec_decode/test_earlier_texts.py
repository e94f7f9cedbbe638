"""Which earlier text a request goes on from, and what is drafted from it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.v1.spec_decode.tiny_engine import Answer, Session, get_runner, make_config, write_tiny
from vllm.config import SpeculativeConfig
from vllm.native.loader import load_library
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_factory import build_engine_core
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.request_options import RequestOptions
from vllm.v1.spec_decode.earlier_texts import _MOST_TEXTS, _MOST_TOKENS, EarlierTexts
from vllm.v1.spec_decode.ngram import NgramProposer, WeighedNgramProposer
from vllm.v1.worker.request_state import RequestState

NUM_BEFORE = 8
PREFIX = list(range(100, 164))


def make_state(
    name: str,
    tokens: list[int],
    num_prompt: int = len(PREFIX),
    num_cached: int = 0,
    owner: str | None = "",
) -> RequestState:
    state = RequestState(name, tokens, num_prompt, SamplingParams(), 0, 1)
    state.text_owner, state.num_cached_tokens = owner, num_cached
    return state


def find(texts: list[RequestState], state: RequestState) -> list[int] | None:
    """Return what followed the prefix, after all have spoken in turn."""
    known = EarlierTexts(NUM_BEFORE)
    for each in [*texts, state]:
        known.note([each])
    earlier = known.find(state)
    if earlier is None:
        return None
    before = state.get_tokens(0, earlier.shared)[-NUM_BEFORE:]
    assert earlier.tokens[: earlier.start].tolist() == before.tolist()
    return list(map(int, earlier.tokens[earlier.start :]))


def test_what_followed_the_longest_common_prefix_is_found() -> None:
    request = make_state("now", [*PREFIX, 1], num_cached=32)
    others = [
        make_state("other end", [*PREFIX[:48], 5, 5, 5]),
        make_state("older", [*PREFIX, 1, 2, 3]),
        make_state("latest", [*PREFIX, 1, 2, 4]),
        make_state("too short", [*PREFIX, 1]),
        make_state("shorter prefix", [*PREFIX[:40], 9, 9, 9]),
    ]
    assert find(others, request) == [2, 4]
    assert find(others[:1], request) == [5, 5, 5]
    assert find(others[3:4], request) is None
    assert find([], request) is None


def test_a_prefix_may_be_shorter_than_what_is_compared() -> None:
    request = make_state("now", PREFIX[:4], 4, num_cached=3)
    assert find([make_state("before", [*PREFIX[:4], 1, 2])], request) == [1, 2]


@pytest.mark.parametrize(
    ("num_cached", "text", "is_found"),
    [
        pytest.param(32, [*PREFIX, 1, 2], True, id="half of the prompt"),
        pytest.param(31, [*PREFIX, 1, 2], False, id="less than half"),
        pytest.param(0, [*PREFIX, 1, 2], False, id="nothing in the cache"),
        pytest.param(64, [*PREFIX[:63], 0, 1, 2], False, id="another text was in the cache"),
        pytest.param(32, [0, *PREFIX[1:], 1, 2], False, id="another beginning"),
        pytest.param(32, PREFIX[:20], False, id="shorter than what was cached"),
    ],
)
def test_at_least_half_of_the_prompt_was_cached_and_begins_the_text(
    num_cached: int, text: list[int], is_found: bool
) -> None:
    request = make_state("now", [*PREFIX, 1], num_cached=num_cached)
    assert (find([make_state("before", text)], request) is not None) == is_found


def test_texts_of_other_owners_and_of_nobody_are_not_looked_at() -> None:
    for owner, other, is_found in (
        ("", "", True),
        ("a", "a", True),
        ("a", "b", False),
        ("", "b", False),
        ("a", "", False),
        ("", None, False),
        (None, "", False),
        (None, None, False),
    ):
        request = make_state("now", [*PREFIX, 1], num_cached=64, owner=owner)
        found = find([make_state("before", [*PREFIX, 1, 2], owner=other)], request)
        assert (found == [2]) == is_found, (owner, other)
        assert (found is None) == (not is_found)


def test_what_was_found_stays_while_a_request_runs() -> None:
    known = EarlierTexts(NUM_BEFORE)
    before = make_state("before", [*PREFIX, 1, 2, 3])
    request = make_state("now", [*PREFIX, 1], num_cached=64)
    known.note([before])
    known.note([request])
    first = known.find(request)
    request.append_tokens([7])
    known.note([make_state("between", [*PREFIX, 1, 7, 8]), request])
    assert known.find(request) is first


def test_what_was_found_does_not_change_with_the_other_text() -> None:
    """The scheduler may not keep what the other request sampled last."""
    known = EarlierTexts(NUM_BEFORE)
    before = make_state("before", [*PREFIX, 1, 2, 3])
    request = make_state("now", [*PREFIX, 1], num_cached=64)
    known.note([before, request])
    found = known.find(request)
    before.match_num_tokens(len(PREFIX) + 1)
    before.append_tokens([8, 9])
    assert found is not None
    assert found.tokens[found.start :].tolist() == [2, 3]


@pytest.mark.parametrize("num_tokens", [1, _MOST_TOKENS // 2 + 1], ids=["many", "long"])
def test_texts_stay_while_their_requests_run(num_tokens: int) -> None:
    """What was found is a part of what is looked up in: another would stand elsewhere."""
    known = EarlierTexts(NUM_BEFORE)
    request = make_state("now", [*PREFIX, 1], num_cached=64)
    known.note([make_state("before", [*PREFIX, 1, 2])])
    known.note([request])
    first = known.find(request)
    assert first is not None
    num_others = 2 * _MOST_TEXTS if num_tokens == 1 else 3
    running = [request]
    for i in range(num_others):
        running.append(make_state(str(i), [0] * num_tokens))
        known.note(running)
    assert known.find(request) is first
    later = make_state("later", [*PREFIX, 1], num_cached=64)
    known.note([make_state("between", [*PREFIX, 1, 7]), *running])
    known.note([*running, later])
    assert known.find(request) is first
    assert known.find(later) is not first


def test_the_oldest_texts_are_forgotten() -> None:
    for num_between, is_found in ((_MOST_TEXTS - 1, True), (_MOST_TEXTS, False)):
        known = EarlierTexts(NUM_BEFORE)
        known.note([make_state("before", [*PREFIX, 1, 2])])
        for i in range(num_between):
            known.note([make_state(str(i), [i])])
        last = make_state("last", [*PREFIX, 1], num_cached=64)
        known.note([last])
        assert (known.find(last) is not None) == is_found


def test_few_long_texts_are_known() -> None:
    for num_more, is_found in ((0, True), (1, False)):
        known = EarlierTexts(NUM_BEFORE)
        before = make_state("before", [*PREFIX, 1, 2])
        known.note([before])
        num_tokens = _MOST_TOKENS - before.num_tokens + num_more
        known.note([make_state("long", [0] * num_tokens)])
        request = make_state("now", [*PREFIX, 1], num_cached=64)
        known.note([request])
        assert (known.find(request) is not None) == is_found


def test_the_latest_text_is_known_however_long_it_is() -> None:
    text = [*PREFIX, *range(_MOST_TOKENS)]
    found = find([make_state("before", text)], make_state("now", PREFIX, num_cached=64))
    assert found is not None
    assert found[:3] == [0, 1, 2]


# ---- what is drafted ---------------------------------------------------------------------------


def make_step(states: list[RequestState], counts: list[int]) -> Any:
    num_rows = sum(counts)
    return SimpleNamespace(
        requests=states,
        sampled_counts=counts,
        sampled_rows=list(range(num_rows)),
        num_tokens=num_rows,
    )


def say(proposer: WeighedNgramProposer, state: RequestState, answer: list[int]) -> int:
    """Have a request answer so; return its steps, of which each drafts."""
    count = num_steps = 0
    draft: list[int] = []
    while count < len(answer):
        right = 0
        while right < len(draft) and answer[count + right : count + right + 1] == [draft[right]]:
            right += 1
        taken = answer[count : count + right + 1]
        state.append_tokens(taken)
        count += len(taken)
        num_steps += 1
        (draft,) = proposer.propose(make_step([state], [1 + len(draft)]), torch.empty(0), {})
    return num_steps


def make_proposer() -> WeighedNgramProposer:
    clock = iter(range(10**6))
    # Each look at the clock is as far from the last: rows cost nothing.
    return WeighedNgramProposer(NgramProposer(8, 1, 8), clock=lambda: float(next(clock)))


def test_an_answer_is_drafted_when_its_prompt_comes_again() -> None:
    rng = np.random.default_rng(2)
    answer = rng.permutation(1000)[:64].tolist()
    proposer = make_proposer()
    assert say(proposer, make_state("first", PREFIX), answer) == 64
    again = make_state("again", PREFIX, num_cached=32)
    assert say(proposer, again, answer) <= 16
    # One token differs: behind it the earlier answer goes on.
    changed = [*answer[:30], 5000, *answer[31:]]
    assert say(proposer, make_state("changed", PREFIX, num_cached=32), changed) <= 20
    edited = make_state("edited", [*PREFIX[:-8], 1, 2, 3], len(PREFIX) - 5, num_cached=32)
    assert say(proposer, edited, answer) <= 20
    assert say(proposer, make_state("elsewhere", PREFIX), answer) == 64


@pytest.mark.slow
def test_an_engine_drafts_what_an_owner_was_answered_before(tmp_path: Path) -> None:
    if load_library() is None:
        pytest.skip("native kernels run no model here")
    config = make_config(write_tiny(tmp_path), None)
    asked = SpeculativeConfig.from_dict({"method": "ngram"})
    core = build_engine_core(replace(config, speculative_config=asked))
    drafter = get_runner(core)._proposer
    assert isinstance(drafter, WeighedNgramProposer)
    num_steps = 0
    drafter._clock = lambda: float(num_steps)

    def answer(text: list[int], **options: Any) -> Answer:
        nonlocal num_steps
        session = Session(core)
        name = f"request {num_steps}"
        session.answers[name] = Answer(text, PARAMS)
        message = EngineCoreRequest(name, text, PARAMS, 0.0, options=RequestOptions(**options))
        core.add_request(core.make_request(message))
        while core.has_work():
            session.step()
            num_steps += 1
        return session.answers[name]

    # The own text drafts as much whoever asks: what more is accepted comes from the earlier one.
    text = np.random.default_rng(0).permutation(200)[:96].tolist()
    first = answer(text)
    again = answer(text)
    assert again.num_cached >= 64
    assert again.tokens == first.tokens
    assert len(again.sizes) < len(first.sizes) / 2
    other = answer(text, cache_salt="other")
    assert other.num_cached == 0
    assert len(other.sizes) > 2 * len(again.sizes)
    hidden = [*text[:80], 3, 4, 5, 6]
    answer(hidden, skip_cache_insert=True)
    unknown = answer(hidden)
    assert len(unknown.sizes) > 2 * len(again.sizes)
    core.reset_prefix_cache()
    emptied = answer(text)
    assert emptied.num_cached == 0
    assert len(emptied.sizes) > 2 * len(again.sizes)


# Sampled at a heat at which nothing repeats itself, with draws that are the same each time.
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True, temperature=1.5, seed=3)
