"""One boundary's recurrent state goes to another engine with the rows: the tokens of one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, assert_greedy
from tests.model_executor.models.decoder.drafting import DRAFTING_MODELS, write_drafting_model
from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.engine.test_handover import MTP, Pair
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.slow

UNIT = 16
MAX_LEN = 256
NUM_ANSWER = 8


class RecurrentPair(Pair):
    """Two engines of a tiny model that drafts."""

    def make(self, transfer: KVTransferConfig, **settings: Any) -> EngineCore:
        folder = settings["folder"]
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = VllmConfig(
            model_config=ModelConfig(
                "tiny", path=str(folder), hf_config=raw, max_model_len=MAX_LEN
            ),
            cache_config=CacheConfig(block_size=UNIT, num_gpu_blocks_override=200),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_LEN, max_num_batched_tokens=48, max_num_seqs=8
            ),
            kv_transfer_config=transfer,
            speculative_config=MTP,
        )
        return EngineCore(config, UniProcExecutor)


@pytest.fixture(params=list(DRAFTING_MODELS))
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RecurrentPair, Any]]:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    target = write_drafting_model(request.param, tmp_path)
    made = RecurrentPair(folder=tmp_path)
    yield made, target
    made.shutdown()


def test_prompts_of_many_lengths(pair: tuple[RecurrentPair, Any]) -> None:
    engines, reference = pair
    for length in (3, 16, 17, 100):
        prompt = random_tokens(length, length, VOCAB_SIZE)
        answer = engines.answer(prompt, NUM_ANSWER)
        assert len(answer.tokens) == NUM_ANSWER
        assert_greedy(reference, prompt, answer.tokens)
        assert answer.stats is not None
        expected = (length - 1) // UNIT * UNIT
        assert answer.stats.num_external_tokens == answer.stats.num_cached_tokens == expected
    # The next turn goes on at the answer's last full unit, which the decoding engine computed.
    said = [*prompt, *answer.tokens, 1]
    request_id = engines.d.add(said, NUM_ANSWER)
    engines.run()
    later = engines.d.answers[request_id]
    assert len(later.tokens) == NUM_ANSWER
    assert_greedy(reference, said, later.tokens)
    assert later.stats is not None
    assert later.stats.num_cached_tokens == (len(said) - 2) // UNIT * UNIT
    engines.check_free()
