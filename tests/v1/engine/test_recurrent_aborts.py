"""Requests over recurrent states end at any moment: those that stay are answered, nothing is lost.

Ends come before a prefill, amid its chunks, between drafts and after preemption; prompts share a
trunk, so that states which one request left are read by others when it ends.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, assert_greedy, write_model
from tests.model_executor.models.decoder.drafting import DRAFTING_MODELS, write_drafting_model
from tests.model_executor.models.decoder.reference import kimi_linear
from tests.model_executor.models.hf_reference import random_tokens
from tests.tokenizers.family_tokenizers import byte_level
from tests.v1.engine.test_cache_keeps_outputs import Session
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

pytestmark = pytest.mark.slow

UNIT, MAX_LEN = 16, 256
NUM_REQUESTS = 70
NGRAM = SpeculativeConfig.from_dict(
    {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
)
MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
# Blocks that hold one request and little more.
NUM_BLOCKS = {"qwen 3.5": 41, "glm": 76, "kimi": 125}


def write(name: str, folder: Path) -> Any:
    """Writes a checkpoint; returns transformers' model."""
    if name in DRAFTING_MODELS:
        return write_drafting_model(name, folder)
    return write_model(kimi_linear(vocab_size=VOCAB_SIZE), folder, byte_level())


def start(name: str, folder: Path) -> Session:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = VllmConfig(
        model_config=ModelConfig("tiny", path=str(folder), hf_config=raw, max_model_len=MAX_LEN),
        cache_config=CacheConfig(block_size=UNIT, num_gpu_blocks_override=NUM_BLOCKS[name]),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_LEN, max_num_batched_tokens=40, max_num_seqs=6
        ),
        speculative_config=MTP if name in DRAFTING_MODELS else NGRAM,
    )
    return Session(EngineCore(config, UniProcExecutor))


@pytest.mark.parametrize("name", list(NUM_BLOCKS))
def test_aborts_at_any_moment_lose_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CHECK_INVARIANTS", "1")
    reference = write(name, tmp_path)
    # Draws by the bare name lead Kimi to a text where two experts' scores differ by 4e-7, and the
    # reference takes the other one.
    session, rng = start(name, tmp_path), random.Random(f"{name} 1")
    trunk = random_tokens(120, 1, VOCAB_SIZE)
    ended: dict[str, set[str]] = {"waiting": set(), "prefill": set(), "decode": set()}
    try:
        while session.core.has_work() or len(session.prompts) < NUM_REQUESTS:
            live = session.core.scheduler.requests
            while len(session.prompts) < NUM_REQUESTS and len(live) < 8:
                own = random_tokens(rng.randint(1, 40), 50 + len(session.prompts), VOCAB_SIZE)
                session.add([*trunk[: rng.randint(0, 60)], *own], rng.randint(20, 100))
            stages: dict[str, list[str]] = {}
            for request_id, request in live.items():
                begun = "decode" if request.num_output_tokens else "prefill"
                stage = begun if request.num_computed_tokens else "waiting"
                stages.setdefault(stage, []).append(request_id)
            # Few steps find a prompt half computed.
            if stages and rng.random() < (0.1 if "prefill" in stages else 0.05):
                stage = "prefill" if "prefill" in stages else rng.choice(sorted(stages))
                request_id = rng.choice(stages[stage])
                ended[stage].add(request_id)
                session.core.abort_requests([request_id])
            session.step()
        assert all(ended.values()), ended
        assert session.num_preemptions > 0
        gone = set.union(*ended.values())
        assert len(gone) < NUM_REQUESTS - 20
        for request_id, (prompt, max_tokens) in session.prompts.items():
            tokens = session.answers[request_id].tokens
            assert request_id in gone or len(tokens) == max_tokens
            # What was said before the end is right too.
            if tokens:
                assert_greedy(reference, prompt, tokens)
        manager = session.core.scheduler.kv_cache_manager
        manager.check_invariants()
        pool = manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    finally:
        session.core.shutdown()
