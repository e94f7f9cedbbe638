"""What drafts where nobody asked for drafts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.v1.spec_decode.tiny_engine import Session, get_runner, make_config, write_tiny
from vllm.config import SpeculativeConfig
from vllm.native.loader import load_library
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core_factory import build_engine_core
from vllm.v1.spec_decode.factory import make_proposer
from vllm.v1.spec_decode.interface import Proposer
from vllm.v1.spec_decode.ngram import WeighedNgramProposer


def make(config: SpeculativeConfig, *, has_same_bits: bool) -> Proposer | None:
    steps = SimpleNamespace(has_same_bits=has_same_bits)
    unused: Any = None
    return make_proposer(config, cast(Any, steps), unused, {}, unused)


@pytest.fixture(autouse=True)
def drafts_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests' engines do not."""
    monkeypatch.setenv("VLLM_UNASKED_DRAFTS", "1")


def test_nobody_is_given_drafts_that_could_change_an_answer() -> None:
    unasked = SpeculativeConfig.unasked()
    assert isinstance(make(unasked, has_same_bits=True), WeighedNgramProposer)
    assert make(unasked, has_same_bits=False) is None
    asked = SpeculativeConfig.from_dict({"method": "ngram"})
    assert isinstance(make(asked, has_same_bits=False), WeighedNgramProposer)


@pytest.mark.slow
def test_few_requests_draft_and_answer_as_without(tmp_path: Path) -> None:
    if load_library() is None:
        pytest.skip("native kernels run no model here")
    folder = write_tiny(tmp_path)
    plain = make_config(folder, None)
    cores = {
        "plain": build_engine_core(plain),
        "filled": build_engine_core(replace(plain, may_draft=True)),
    }
    assert cores["filled"].scheduler.limits.num_spec_tokens > 0
    assert get_runner(cores["plain"])._proposer is None
    drafter = get_runner(cores["filled"])._proposer
    assert isinstance(drafter, WeighedNgramProposer)
    # By this clock rows and looks cost nothing, so that what matches is drafted.
    num_steps = 0
    drafter._clock = lambda: float(num_steps)
    texts = [[7 + i, 8, 9, 10] * 8 for i in range(4)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.7, seed=3, logprobs=1)
    for count in (1, 2, 4):
        answers = {}
        for name, core in cores.items():
            session = Session(core)
            for i, text in enumerate(texts[:count]):
                session.add(text, params, f"{count}-{i}")
            while core.has_work():
                session.step()
                num_steps += 1
            answers[name] = list(session.answers.values())
        for one, other in zip(answers["plain"], answers["filled"], strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        has_drafted = any(answer.num_draft_tokens for answer in answers["filled"])
        assert has_drafted == (count <= 2), count


@pytest.mark.slow
def test_a_pool_without_room_for_drafts_serves_all_the_same(tmp_path: Path) -> None:
    """They take blocks, too: engines that started before still start, and preempt nobody."""
    if load_library() is None:
        pytest.skip("native kernels run no model here")
    folder = write_tiny(tmp_path)
    # The fewest blocks that hold one request of the longest length.
    plain = make_config(folder, None, num_blocks=117)
    cores = {
        "plain": build_engine_core(plain),
        "filled": build_engine_core(replace(plain, may_draft=True)),
    }
    drafter = get_runner(cores["filled"])._proposer
    assert isinstance(drafter, WeighedNgramProposer)
    drafter._clock = lambda: 0.0
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    answers = {}
    for name, core in cores.items():
        session = Session(core)
        session.add([7, 8, 9, 10] * 75, params)
        session.run()
        (answers[name],) = session.answers.values()
    assert answers["filled"].tokens == answers["plain"].tokens
    assert len(answers["filled"].tokens) == 300
    assert answers["filled"].num_draft_tokens > 0
    assert answers["filled"].num_preemptions == 0
