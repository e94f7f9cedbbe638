"""Bad input has one answer: the same error, word for word, on a CPU and in reference mode."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.checkpoints import FAMILIES
from tests.v1.engine.test_cache_keeps_outputs import Session
from vllm.config.additional import KNOWN_KEYS
from vllm.entrypoints.cli.main import make_parser
from vllm.exceptions import ConfigError
from vllm.platforms.resolve import get_current_platform
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm_ascend import plugin
from vllm_ascend.envs import COMPRESSED_BLOCK_VARIABLE, REFERENCE_VARIABLE

INTERVALS = "use auto, none, 0, or a positive multiple of"


@pytest.fixture(params=["cpu", "ascend-reference"], autouse=True)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The platform of this process, chosen as a server's is."""
    monkeypatch.delenv(COMPRESSED_BLOCK_VARIABLE, raising=False)
    monkeypatch.setenv(REFERENCE_VARIABLE, str(int(request.param != "cpu")))
    get_current_platform.cache_clear()
    assert get_current_platform().device_name == request.param
    name: str = request.param
    return name


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["mistral"]), encoding="utf-8")
    return str(tmp_path)


def start(model: str, **arguments: Any) -> EngineCore:
    """Start an engine with random weights as a server does."""
    args = EngineArgs(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        kv_cache_memory_bytes=8 << 20,
        **arguments,
    )
    config = get_current_platform().check_and_update_config(args.create_vllm_config())
    return EngineCore(config, UniProcExecutor)


@pytest.mark.parametrize("size", [-32, 16, 48, 256])
def test_block_sizes_of_deepseek_v4(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        start("deepseek-v4", block_size=size)
    assert str(caught.value) == (
        f"block_size={size} is not supported for DeepSeek-V4: use one of 32, 64, 128."
    )


def test_a_block_size_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "deepseek-v4", "--block-size", "foo"])
    assert "argument --block-size: 'foo' is not a whole number" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["33", "-32", "foo"])
def test_intervals_of_deepseek_v4(interval: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start("deepseek-v4", prefix_cache_retention_interval=interval)
    assert str(caught.value) == (
        f"prefix_cache_retention_interval={interval!r} is not valid here: {INTERVALS} 32 tokens."
    )


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "interval"), [(16, "33"), (32, "48")])
def test_intervals_of_windows_alone(mistral: str, block_size: int, interval: str) -> None:
    with pytest.raises(ConfigError) as caught:
        start(mistral, block_size=block_size, prefix_cache_retention_interval=interval)
    assert str(caught.value) == (
        f"prefix_cache_retention_interval={interval!r} is not valid here: {INTERVALS} "
        f"{block_size} tokens."
    )


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "expected"), [("0", 0), ("48", 96)])
def test_any_multiple_of_the_block_is_an_interval_of_windows_alone(
    mistral: str, interval: str, expected: int
) -> None:
    core = start(mistral, block_size=16, prefix_cache_retention_interval=interval)
    session = Session(core)
    prompt = list(range(200))
    hits = []
    for tokens in (prompt, [*prompt[:120], *range(250, 300)]):
        name = session.add(tokens, 2)
        session.run()
        stats = session.answers[name].stats
        assert stats is not None
        hits.append(stats.num_cached_tokens)
    core.shutdown()
    assert hits == [0, expected]


def test_unknown_keys_of_additional_config() -> None:
    with pytest.raises(ConfigError) as caught:
        start("deepseek-v4", additional_config={"refresh": True, "foo": 1, "bar": {}})
    assert str(caught.value).startswith(
        "additional-config has unknown keys 'bar', 'foo': use ascend_compilation_config, "
    )


def test_known_keys_of_additional_config_change_nothing() -> None:
    plain = EngineArgs("deepseek-v4", load_format="dummy")
    values = ({"enabled": True}, True, 8, "a.json")
    given = {key: values[i % len(values)] for i, key in enumerate(KNOWN_KEYS)}
    keyed = EngineArgs("deepseek-v4", load_format="dummy", additional_config=given)
    resolve = get_current_platform().check_and_update_config
    assert resolve(keyed.create_vllm_config()) == resolve(plain.create_vllm_config())


def test_the_compressors_variable_beside_another_block_size(
    platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(COMPRESSED_BLOCK_VARIABLE, "64")
    monkeypatch.setenv(plugin._TOLD, "")
    get_current_platform.cache_clear()
    if platform == "cpu":
        start("deepseek-v4", block_size=32).shutdown()
        assert f"No NPU is used, so {COMPRESSED_BLOCK_VARIABLE}=64 has no effect" in caplog.text
    else:
        words = f"--block-size 32 and {COMPRESSED_BLOCK_VARIABLE}=64"
        with pytest.raises(ConfigError, match=words):
            start("deepseek-v4", block_size=32)
