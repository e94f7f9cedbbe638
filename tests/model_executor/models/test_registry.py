"""Architectures by name; resolving one must not load torch."""

import subprocess
import sys

import pytest

from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.models.registry import MODELS, read_architectures, resolve_model


def test_the_first_known_architecture_wins() -> None:
    entry = resolve_model(["Unknown", "DeepseekV4ForCausalLM"])
    assert entry.load_model_class().__name__ == "DeepseekV4ForCausalLM"


@pytest.mark.parametrize("names", [["BertForMaskedLM"], []])
def test_others_are_refused_by_name(names: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        resolve_model(names)
    assert "DeepseekV4ForCausalLM" in str(caught.value)
    assert (names or ["none"])[0] in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_v32", "DeepseekV32ForCausalLM"),
        ("deepseek_v4", "DeepseekV4ForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("gemma4_text", "Gemma4ForCausalLM"),
        ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
        ("glm5_next", "Glm5NextForConditionalGeneration"),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
        ("kimi_linear", "KimiLinearForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("ministral", "MinistralForCausalLM"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM"),
    ],
)
def test_a_config_without_names_is_known_by_its_type(kind: str, name: str) -> None:
    """As transformers' ``config.save_pretrained`` writes it."""
    raw = {"model_type": kind}
    assert read_architectures(raw) == read_architectures({**raw, "architectures": []}) == [name]
    assert read_architectures({**raw, "architectures": ["Other"]}) == ["Other"]
    other = {**raw, "model_type": "other"}
    with pytest.raises(ConfigError, match="'model_type' is 'other'.*allowed:.*" + kind):
        MODELS[name].parse_config(other)


def test_a_config_of_an_unknown_type_has_no_architecture() -> None:
    assert read_architectures({"model_type": "bert"}) == read_architectures({}) == []
    assert read_architectures({"model_type": ["llama"]}) == []


@pytest.mark.slow
def test_configs_and_specs_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from vllm.exceptions import ConfigError\n"
        "from vllm.model_executor.models.registry import MODELS\n"
        "for entry in MODELS.values():\n"
        "    entry.load_kv_cache_specs()\n"
        "    try:\n"
        "        entry.parse_config({'model_type': 'none'})\n"
        "    except ConfigError:\n"
        "        pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
