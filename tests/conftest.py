"""What every test finds: plain loggers, and nothing that a busy machine could fail."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")

# Torch's threads spin while they wait for each other. On busy cores a spinning one keeps its peer
# from running: at a load of 7 on 2 cores that made a test of 2.5 s take 45 s, and the time limit of
# a test is in seconds. Read when torch is loaded, which no conftest does before this one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _reset_loggers() -> None:
    for name in ("vllm", "vllm_ascend"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True, scope="session")
def start_with_plain_logging() -> None:
    """Begin as imported."""
    _reset_loggers()


@pytest.fixture(autouse=True)
def keep_plain_logging() -> Iterator[None]:
    """Undo ``setup_logging``: a logger that does not propagate hides its lines from caplog."""
    yield
    _reset_loggers()
