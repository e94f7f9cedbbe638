"""What does not fit is refused before a weight is read, with the bytes needed and free."""

import logging
import re
from pathlib import Path

import pytest

from vllm import LLM
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.memory_check import MemoryNeeds, check_memory, estimate_activation_bytes

GIB = 1 << 30


def make_config(**fields: object) -> VllmConfig:
    path = resolve_checkpoint("deepseek-v4").path
    raw = {**read_hf_config(path), **fields}
    return VllmConfig(
        model_config=ModelConfig("deepseek-v4", path=path, hf_config=raw),
        cache_config=CacheConfig(block_size=32),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=128),
    )


def test_a_refusal_names_what_is_needed_and_what_is_free() -> None:
    needs = MemoryNeeds(weights=3 * GIB, kv_cache=GIB, activations=GIB // 2)
    assert needs.total == 4831838208
    with pytest.raises(ConfigError) as caught:
        check_memory(make_config(), needs, needs.total - 1)
    message = str(caught.value)
    for part in (
        "4,831,838,208 bytes",
        "4,831,838,207 bytes",
        "weights 3.00 GiB",
        "a KV cache of one request of 16384 tokens 1.00 GiB",
    ):
        assert part in message


def test_what_fits_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    needs = MemoryNeeds(weights=3 * GIB, kv_cache=GIB, activations=GIB)
    with caplog.at_level(logging.INFO):
        check_memory(make_config(), needs, needs.total)
    assert "at least 5.00 GiB is needed, 5.00 GiB is free" in caplog.text


def test_activations_grow_with_what_they_are_made_of() -> None:
    base = estimate_activation_bytes(make_config())
    assert 10e6 < base < 100e6
    for field, value in (("hidden_size", 256), ("vocab_size", 7168), ("moe_intermediate_size", 64)):
        assert estimate_activation_bytes(make_config(**{field: value})) > base
    quantised = estimate_activation_bytes(make_config(quantization_config={"quant_method": "fp8"}))
    assert quantised > base


def test_other_families_fields() -> None:
    text = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}
    nested = make_config()
    nested.model_config.hf_config = {"text_config": text}
    flat = make_config()
    flat.model_config.hf_config = text
    assert estimate_activation_bytes(nested) == estimate_activation_bytes(flat) > 0


@pytest.mark.slow
def test_weights_are_not_read_when_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(CpuPlatform, "free_memory_bytes", lambda self: 20_000_000)
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        LLM(model="deepseek-v4", block_size=32)
    assert "20,000,000 bytes) are free" in str(caught.value)
    needed = int(re.search(r"\(([\d,]+) bytes\), but", str(caught.value))[1].replace(",", ""))
    weights = Path(resolve_checkpoint("deepseek-v4").path, "model.safetensors").stat().st_size
    assert needed > weights
    assert "Loaded" not in caplog.text
