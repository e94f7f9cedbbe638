"""What stands for a retention interval, and what does not."""

import pytest

from vllm.config.retention import read_interval
from vllm.exceptions import ConfigError


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, "auto"),
        ("Auto", "auto"),
        (" none ", "none"),
        (0, 0),
        ("0", 0),
        (256, 256),
        ("128", 128),
    ],
)
def test_what_is_taken(value: str | int | None, read: str | int) -> None:
    assert read_interval(value, 128) == read


@pytest.mark.parametrize("value", [-128, "-128", 64, "129", "1.5", "all", ""])
def test_what_is_refused(value: str | int) -> None:
    with pytest.raises(ConfigError, match="use auto, none, 0, or a positive multiple of 128"):
        read_interval(value, 128)
