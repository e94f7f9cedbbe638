"""The server that others are compared with hits whole blocks of all groups, or nothing."""

import random

import pytest

from benchmarks.old_server import OldCore
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core, random_tokens
from vllm.v1.executor.uniproc_executor import UniProcExecutor


@pytest.mark.slow
def test_below_the_common_multiple_of_all_blocks_it_hits_nothing() -> None:
    config = make_core(32, num_blocks=1500, budget=512, max_len=1024).scheduler.vllm_config
    core = OldCore(config, UniProcExecutor)
    prompt = random_tokens(random.Random(3), 300)
    session = Session(core)
    for _ in range(2):
        session.add(prompt, 4)
        session.run()
    answers = list(session.answers.values())
    assert answers[0].tokens == answers[1].tokens
    assert [a.stats.num_cached_tokens for a in answers if a.stats is not None] == [0, 0]
    assert core.scheduler.kv_cache_manager.coordinator.geometry.unit == 4096
