"""Requests that leave nothing, on a real model: equal answers, and no byte of them in the pool."""

import random

import pytest
import torch

from tests.v1.engine.test_cache_keeps_outputs import Session, make_core
from vllm.config import SpeculativeConfig
from vllm.v1.engine.core import EngineCore

pytestmark = pytest.mark.slow
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2)


def settle(session: Session) -> None:
    """Run until nothing is to be done, the steps that tell workers of ends included."""
    while session.core.has_work():
        session.step()


def pool_of(core: EngineCore) -> torch.Tensor:
    runner = core.executor._worker._runner  # type: ignore[attr-defined]
    return torch.cat([tensor.view(torch.uint8) for tensor in runner._pool.tensors], dim=1)


@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
@pytest.mark.parametrize("budget", [128, 2048], ids=["chunks", "whole"])
def test_the_pool_holds_no_byte_of_them(
    speculative: SpeculativeConfig | None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SCRUB_UNCACHED", "1")
    core = make_core(32, num_blocks=400, budget=budget, speculative=speculative)
    session = Session(core)
    rng = random.Random(2)
    shared = [rng.randrange(5, 1500) for _ in range(300)]
    session.add(shared, 8)
    settle(session)
    before = pool_of(core).clone()
    secret = [rng.randrange(5, 1500) for _ in range(250)]
    told = session.add(shared + secret, 12, skip_cache_insert=True)
    settle(session)
    assert session.answers[told].stats is not None
    assert session.answers[told].stats.num_cached_tokens >= 256
    # A client that leaves in the middle of its prompt, and one in the middle of its answer.
    for num_steps in (1, 6):
        left = session.add(shared[:100] + secret, 50, skip_cache_insert=True)
        for _ in range(num_steps):
            session.step()
        core.abort_requests([left])
    settle(session)
    after = pool_of(core)
    is_same = (after == before).all(dim=1)
    is_zero = (after == 0).all(dim=1)
    assert bool((is_same | is_zero).all())
    # Nobody finds it, and what was there before is found as ever.
    again = session.add(shared + secret, 12)
    settle(session)
    stats = session.answers[again].stats
    assert stats is not None
    assert 256 <= stats.num_cached_tokens <= 300
    assert session.answers[again].tokens == session.answers[told].tokens
    core.shutdown()
