"""The server that others are compared with hits whole blocks of all groups, or nothing."""

import random

import pytest

from benchmarks.old_server import OldCore
from tests.v1.engine.test_cache_keeps_outputs import Session, make_core, random_tokens
from vllm.v1.executor.uniproc_executor import UniProcExecutor


@pytest.mark.slow
def test_it_hits_the_common_multiple_of_all_blocks_and_nothing_below() -> None:
    config = make_core(32, num_blocks=1500, budget=1024, max_len=5000).scheduler.vllm_config
    core = OldCore(config, UniProcExecutor)
    session = Session(core)
    hits = {}
    for num_tokens in (4096, 4200):
        prompt = random_tokens(random.Random(num_tokens), num_tokens)
        for _ in range(2):
            session.add(prompt, 4)
            session.run()
        cold, warm = list(session.answers.values())[-2:]
        assert cold.tokens == warm.tokens
        assert cold.stats is not None
        assert warm.stats is not None
        assert cold.stats.num_cached_tokens == 0
        hits[num_tokens] = warm.stats.num_cached_tokens
    # A prompt's last token is always computed.
    assert hits == {4096: 0, 4200: 4096}
