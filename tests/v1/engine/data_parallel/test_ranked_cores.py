"""Two cores of two ranks each: the tokens of one process."""

import pytest

from tests.model_executor.models.hf_reference import random_tokens
from tests.v1.executor.rank_engines import run_engine
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.slow


def test_two_cores_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_NUM_THREADS", "1"), ("VLLM_NATIVE", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ASCEND_REFERENCE", "0")
    prompts = [random_tokens(length, length, 500) for length in (150, 90, 40)]
    sizes = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512, "block_size": 32}
    expected, _ = run_engine(prompts, model="deepseek-v4", **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM("deepseek-v4", tensor_parallel_size=2, data_parallel_size=2, **sizes) as llm:
        for cached in ([0, 0, 0], [128, 64, 32]):
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            # Each prompt goes where it was before.
            assert [output.num_cached_tokens for output in outputs] == cached
