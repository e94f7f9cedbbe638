"""What every test finds: loggers as an import leaves them, no deadline for generated examples."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


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
