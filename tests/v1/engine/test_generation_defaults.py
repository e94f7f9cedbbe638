"""Values of generation_config.json: what they set, and what is refused before weights load."""

from typing import Any

import pytest

from vllm.exceptions import ConfigError
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.generation_defaults import (
    answer_limit,
    check_generation_config,
    sampling_defaults,
)


def test_what_releases_set_is_taken() -> None:
    config = {
        **{"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": None},
        **{"repetition_penalty": 1.05, "max_new_tokens": 512, "eos_token_id": [7, 8]},
        "transformers_version": "5.0",
    }
    check_generation_config(config)
    assert sampling_defaults(config) == {
        **{"temperature": 0.6, "top_k": 20, "top_p": 1, "repetition_penalty": 1.05}
    }
    assert answer_limit(config) == 512
    assert (sampling_defaults({}), answer_limit({})) == ({}, None)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("temperature", "0.6", "must be a number, got '0.6'"),
        ("temperature", True, "must be a number, got True"),
        ("temperature", -1, "between 0 and 2, got -1"),
        ("top_p", 0, "got 0"),
        ("top_k", 1.5, "must be a whole number, got 1.5"),
        ("min_p", 2, "got 2"),
        ("repetition_penalty", 0, "got 0"),
        ("max_new_tokens", "3", "must be a whole number, got '3'"),
        ("max_new_tokens", 0, "must be at least 1, got 0"),
        ("eos_token_id", ["a"], r"a list of them, got \['a'\]"),
        ("eos_token_id", -1, "got -1"),
        ("eos_token_id", [None], r"got \[None\]"),
    ],
)
def test_values_that_no_request_can_be_answered_with_are_refused(
    name: str, value: Any, why: str
) -> None:
    """Else every client would be told of a field that it did not send, or the engine would end."""
    with pytest.raises(ConfigError, match=f"generation config: {name}.*{why}"):
        EngineArgs(override_generation_config={name: value}).create_vllm_config()


def test_end_tokens_of_the_config_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id .* got \[1, 'x'\]"):
        EngineArgs(
            model="deepseek-v4", hf_overrides={"eos_token_id": [1, "x"]}
        ).create_vllm_config()
