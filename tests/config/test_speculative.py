"""What ``--speculative-config`` takes and refuses."""

from typing import Any

import pytest

from vllm.config.engine_args import EngineArgs
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import ConfigError


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "method None"),
        ({"method": "eagle"}, "eagle"),
        ({"method": "mtp", "draft_length": 2}, "draft_length"),
        ({"method": "mtp", "num_speculative_tokens": 5}, "1 to 4"),
        ({"method": "mtp", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "mtp", "num_speculative_tokens": True}, "must be a number"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "ngram"),
        ({"method": "mtp", "model": "other"}, "other"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.from_dict(raw)


def test_lookup_bounds_follow_one_another() -> None:
    config = SpeculativeConfig.from_dict({"model": "[ngram]", "prompt_lookup_max": 1})
    assert (config.method, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 1, 1)
    config = SpeculativeConfig.from_dict({"method": "ngram", "prompt_lookup_min": 6})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (6, 6)


def test_engine_args_hand_it_on() -> None:
    raw = {"method": "mtp", "num_speculative_tokens": 2}
    config = EngineArgs(speculative_config=raw).create_vllm_config()
    assert config.speculative_config is not None
    assert config.num_speculative_tokens == 2
    assert EngineArgs().create_vllm_config().speculative_config is None
