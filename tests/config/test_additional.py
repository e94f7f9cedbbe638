import pytest

from vllm.config.additional import KNOWN_KEYS, explain_additional_config
from vllm.exceptions import ConfigError


def test_known_keys_are_named_with_their_reason() -> None:
    assert explain_additional_config({}) == []
    lines = explain_additional_config({"dynamic_eplb": True, "refresh": 1})
    assert lines == [
        f"additional-config: {key} is accepted and has no effect: {KNOWN_KEYS[key]}."
        for key in ("dynamic_eplb", "refresh")
    ]


def test_unknown_keys_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown keys 'a', 'refresj': use ascend_comp"):
        explain_additional_config({"refresj": 1, "refresh": 1, "a": 2})
