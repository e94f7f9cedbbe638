"""``--block-size`` and the variable beside it, as the front end and the engine core see them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.config.vllm import VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.platforms.resolve import get_current_platform
from vllm.v1.engine.engine_args import EngineArgs
from vllm_ascend.envs import COMPRESSED_BLOCK_VARIABLE, REFERENCE_VARIABLE


@pytest.fixture(autouse=True)
def _reference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE_VARIABLE, "1")
    monkeypatch.delenv(COMPRESSED_BLOCK_VARIABLE, raising=False)
    get_current_platform.cache_clear()


def both_see(block_size: int | None, model: str = "deepseek-v4") -> tuple[int, int]:
    """The block size of the front end's config, and of the engine core's."""
    config: VllmConfig = EngineArgs(
        model, block_size=block_size, load_format="dummy"
    ).create_vllm_config()
    core = get_current_platform().check_and_update_config(config)
    return config.cache_config.block_size, core.cache_config.block_size


def test_the_front_end_asks_without_loading_torch() -> None:
    code = (
        "import sys; from vllm.v1.engine.engine_args import EngineArgs;"
        "config = EngineArgs('deepseek-v4', load_format='dummy').create_vllm_config();"
        "print(config.cache_config.block_size, 'vllm_ascend.platform' in sys.modules,"
        " 'torch' in sys.modules)"
    )
    variables = {REFERENCE_VARIABLE: "1", COMPRESSED_BLOCK_VARIABLE: "128"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "128 True False\n"


def test_without_the_variable() -> None:
    assert both_see(None) == (32, 32)
    assert both_see(128) == (128, 128)


@pytest.mark.parametrize("value", [32, 64, 128])
def test_the_variable_is_the_default(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, str(value))
    assert both_see(None) == (value, value)
    assert both_see(value) == (value, value)


@pytest.mark.parametrize(("flag", "variable"), [(32, 64), (64, 32), (128, 32)])
def test_an_explicit_disagreement_names_both(
    flag: int, variable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, str(variable))
    with pytest.raises(
        ConfigError, match=f"--block-size {flag} and {COMPRESSED_BLOCK_VARIABLE}={variable}"
    ):
        both_see(flag)


@pytest.mark.parametrize("value", ["16", "256", "many"])
def test_any_other_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, value)
    for flag in (None, 32):
        with pytest.raises(ConfigError, match=f"{COMPRESSED_BLOCK_VARIABLE}='{value}'"):
            both_see(flag)


def test_a_model_without_c128_layers_does_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(resolve_checkpoint("deepseek-v4").path)
    raw = json.loads((source / "config.json").read_text())
    raw["compress_ratios"] = [4 if ratio == 128 else ratio for ratio in raw["compress_ratios"]]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, "64")
    assert both_see(None, str(tmp_path)) == (32, 32)
    assert both_see(128, str(tmp_path)) == (128, 128)
    assert both_see(None) == (64, 64)
