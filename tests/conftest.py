"""What every test leaves behind as it found it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """Undo ``setup_logging``: a logger that does not propagate hides its lines from caplog."""
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm_ascend")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
