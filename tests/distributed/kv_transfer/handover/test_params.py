"""``kv_transfer_params``: what is handed on unchanged is understood, all else is told."""

from typing import Any

import pytest

from vllm.distributed.kv_transfer.handover.params import (
    NO_WISH,
    NOTHING_HELD,
    RemotePrefix,
    digest_prompt,
    parse_params,
)
from vllm.exceptions import UserInputError

PREFIX = RemotePrefix("engine-p", "run-1", "10.0.0.1", 14579, "req-1", 96, "ab" * 32, 17)


def test_what_is_answered_is_understood() -> None:
    params = PREFIX.to_params([[1, 2], [3]])
    assert params["remote_block_ids"] == [[1, 2], [3]]
    assert parse_params(params).takes == PREFIX
    assert parse_params({**params, "remote_next_token": None, "tp_size": 1}).takes is not None


def test_nothing_is_asked() -> None:
    assert parse_params(None) == parse_params({}) == parse_params(NOTHING_HELD) == NO_WISH
    assert parse_params({"do_remote_decode": True}).gives


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"remote_port": "14579"}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_port": 0}, "remote_port=0"),
        ({"remote_port": 70_000}, "70000"),
        ({"remote_num_tokens": -5}, "-5"),
        ({"remote_num_tokens": 1.5}, "remote_num_tokens"),
        ({"remote_host": ""}, "host"),
        ({"remote_host": "a\nb"}, "host"),
        ({"remote_request_id": "x" * 300}, "lease"),
        ({"remote_next_token": "a"}, "remote_next_token"),
        ({"do_remote_decode": True}, "both"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
    ],
)
def test_wrong_fields_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserInputError, match=named) as caught:
        parse_params({**PREFIX.to_params([]), **change})
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize("missing", ["remote_host", "remote_instance", "remote_prompt_digest"])
def test_missing_fields_are_named(missing: str) -> None:
    params = PREFIX.to_params([])
    del params[missing]
    with pytest.raises(UserInputError, match=missing):
        parse_params(params)


def test_digests_tell_prompts_and_salts_apart() -> None:
    digests = {
        digest_prompt(tokens, salt)
        for tokens in ([1, 2], [2, 1], [1], [1, 2, 0])
        for salt in (None, "", "a", "None")
    }
    assert len(digests) == 16
