"""A worker in reference mode finds the description, and serves from int8 weights."""

import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.ascend.quantization.modelslim_files import quantise_checkpoint
from tests.v1.engine.test_cache_keeps_outputs import Session, random_tokens
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm_ascend.platform import ReferencePlatform
from vllm_ascend.quantization.description import DESCRIPTION_FILE
from vllm_ascend.quantization.modelslim import ModelSlimQuantization


def test_a_described_folder_is_quantised(tmp_path: Path) -> None:
    platform = ReferencePlatform()
    assert platform.find_quantization(str(tmp_path)) is None
    (tmp_path / DESCRIPTION_FILE).write_text('{"a.b.weight": "FLOAT"}')
    assert isinstance(platform.find_quantization(str(tmp_path)), ModelSlimQuantization)
    (tmp_path / DESCRIPTION_FILE).write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object"):
        platform.find_quantization(str(tmp_path))


@pytest.mark.slow
def test_an_engine_serves_int8_weights_and_hits(tmp_path: Path) -> None:
    source = Path(resolve_checkpoint("deepseek-v4").path)
    quantise_checkpoint(source, tmp_path)
    for file in source.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    model = ModelConfig(
        str(tmp_path),
        path=str(tmp_path),
        hf_config=read_hf_config(tmp_path),
        max_model_len=512,
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=32, num_gpu_blocks_override=200),
        scheduler_config=SchedulerConfig(max_model_len=512, max_num_batched_tokens=256),
    )
    core = EngineCore(config, partial(UniProcExecutor, platform=ReferencePlatform()))
    prompt = random_tokens(random.Random(0), 100)
    answers = []
    for _ in range(2):
        session = Session(core)
        request = session.add(prompt, 6)
        session.run()
        answers.append(session.answers[request])
    first, again = answers
    assert len(first.tokens) == 6
    assert first.tokens == again.tokens
    assert again.stats is not None
    assert again.stats.num_cached_tokens == 96
    core.shutdown()
