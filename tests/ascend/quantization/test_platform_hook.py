"""A worker in reference mode finds the description, and serves from int8 weights."""

import random
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.ascend.quantization.modelslim_files import quantise_checkpoint
from tests.v1.engine.test_cache_keeps_outputs import Session, random_tokens
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import CheckpointError, ConfigError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
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


def make_core(folder: Path, platform: Platform) -> EngineCore:
    """Build an engine that was told ``--quantization ascend``."""
    model = ModelConfig(
        str(folder),
        path=str(folder),
        hf_config=read_hf_config(folder),
        max_model_len=512,
        quantization="ascend",
    )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=32, num_gpu_blocks_override=200),
        scheduler_config=SchedulerConfig(max_model_len=512, max_num_batched_tokens=256),
    )
    return EngineCore(config, partial(UniProcExecutor, platform=platform))


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded checkpoint, its matrices quantised by ModelSlim's scheme."""
    folder = tmp_path_factory.mktemp("described")
    source = Path(resolve_checkpoint("deepseek-v4").path)
    quantise_checkpoint(source, folder)
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform", [ReferencePlatform(), CpuPlatform()], ids=["not described", "not Ascend"]
)
def test_the_flag_is_held_against_the_checkpoint(platform: Platform, described: Path) -> None:
    plain = Path(resolve_checkpoint("deepseek-v4").path)
    folder = described if platform.device_name == "cpu" else plain
    with pytest.raises(ConfigError, match=r"quantization='ascend' means matrices that quant_model"):
        make_core(folder, platform)


@pytest.mark.slow
def test_an_engine_serves_int8_weights_and_hits(described: Path) -> None:
    core = make_core(described, ReferencePlatform())
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
