"""Architectures by name; resolving one must not load torch."""

import subprocess
import sys

import pytest

from vllm.exceptions import UnsupportedModelError
from vllm.model_executor.models.registry import resolve_model


def test_the_first_known_architecture_wins() -> None:
    entry = resolve_model(["Unknown", "DeepseekV4ForCausalLM"])
    assert entry.load_model_class().__name__ == "DeepseekV4ForCausalLM"


@pytest.mark.parametrize("names", [["BertForMaskedLM"], []])
def test_others_are_refused_by_name(names: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        resolve_model(names)
    assert "DeepseekV4ForCausalLM" in str(caught.value)
    assert (names or ["none"])[0] in str(caught.value)


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
