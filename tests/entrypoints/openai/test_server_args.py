"""Settings of the server."""

from typing import Any

import pytest

from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 65536},
        {"shutdown_timeout_s": -0.1},
        {"max_log_len": -1},
        {"generation_config": "/some/folder"},
        {"api_keys": ("a", "")},
        {"allow_credentials": True, "allowed_origins": ("*",)},
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ServerArgs(**wrong)


def test_limits_are_allowed() -> None:
    args = ServerArgs(port=0, shutdown_timeout_s=0, max_log_len=0, allowed_origins=("*",))
    found = (args.port, args.shutdown_timeout_s, args.max_log_len, args.allowed_origins)
    assert found == (0, 0, 0, ("*",))
