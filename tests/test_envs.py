"""Environment variables: read late, parsed once, errors that name the variable."""

import pytest

from vllm import envs
from vllm.exceptions import ConfigError

INTERVAL = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        ("none", None),
        ("None", None),
        ("auto", "auto"),
        (" AUTO ", "auto"),
        ("0", 0),
        ("4096", 4096),
        # The range is the coordinator's to judge.
        ("-32", -32),
    ],
)
def test_retention_interval(
    text: str | None, expected: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is None:
        monkeypatch.delenv(INTERVAL, raising=False)
    else:
        monkeypatch.setenv(INTERVAL, text)
    value = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["dense!", "1.5", "4k", "auto,0"])
def test_bad_retention_interval(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERVAL, text)
    with pytest.raises(ConfigError, match=f"{INTERVAL}='{text}'.*none, auto, 0 or a number"):
        _ = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL


def test_pinning_is_off_and_capped_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_PIN_SWA_TOKENS", "VLLM_PIN_MIN_DROP_SIZE", "VLLM_PIN_MAX_SHARE"):
        monkeypatch.delenv(name, raising=False)
    assert envs.VLLM_PIN_SWA_TOKENS is False
    assert envs.VLLM_PIN_MIN_DROP_SIZE == 16
    assert envs.VLLM_PIN_MAX_SHARE == 0.25
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "true")
    monkeypatch.setenv("VLLM_PIN_MAX_SHARE", "1")
    assert envs.VLLM_PIN_SWA_TOKENS is True
    assert envs.VLLM_PIN_MAX_SHARE == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_PIN_SWA_TOKENS", "maybe"),
        ("VLLM_PIN_MIN_DROP_SIZE", "-1"),
        ("VLLM_PIN_MIN_DROP_SIZE", "x"),
        ("VLLM_PIN_MAX_SHARE", "1.1"),
        ("VLLM_PIN_MAX_SHARE", "-0.1"),
        ("VLLM_PIN_MAX_SHARE", "nan"),
    ],
)
def test_bad_pinning_values(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=name):
        getattr(envs, name)


def test_none_is_told_from_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERVAL, raising=False)
    assert not envs.is_set(INTERVAL)
    monkeypatch.setenv(INTERVAL, "none")
    assert envs.is_set(INTERVAL)


def test_variables_that_nothing_reads_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_KV_CACHE_SPACE", "VLLM_USE_V1", "VLLM_NATIVE", "VLLM_ASCEND_REFERENCE"):
        monkeypatch.setenv(name, "1")
    misspelt, foreign = envs.describe_unknown()
    assert misspelt.startswith("VLLM_CPU_KV_CACHE_SPACE has no effect")
    assert misspelt.endswith("did you mean VLLM_CPU_KVCACHE_SPACE?")
    assert foreign == "VLLM_USE_V1 has no effect: this server reads no such variable."
