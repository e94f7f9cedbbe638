"""A recorded run with pictures is replayed step for step: pictures are what they are, not text."""

from pathlib import Path

import pytest

from benchmarks.image_exactness import Engine, draw_turns
from tests.entrypoints.test_llm_images import write_seeing
from vllm.cachelab.twin.exact import ExactTwin
from vllm.cachelab.twin.trace_file import read_trace


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen35"])
def test_steps_and_hits_are_those_of_the_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that end at a picture both ways, waits for towers, boundaries at a picture's ends."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write_seeing(family, tmp_path)
    path = tmp_path / "trace.jsonl"
    engine = Engine(
        str(tmp_path),
        block_size=16,
        max_model_len=1024,
        max_num_seqs=4,
        # Less than what the prompts take.
        num_gpu_blocks_override=150,
        max_num_batched_tokens=300,
        cache_trace=str(path),
    )
    with engine.llm:
        engine.ask(draw_turns(24, 250, 2), at_a_time=4)
    trace = read_trace(path, is_strict=True)
    assert trace.header.images is not None
    twin = ExactTwin(trace).run()
    recorded = {number: own.cached_tokens for number, own in trace.requests.items()}
    assert twin.cached_tokens == recorded
    assert sum(filter(None, recorded.values())) > 0
    assert twin.diverged_at is None
