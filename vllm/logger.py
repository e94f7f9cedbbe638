"""Logging: one handler on the ``vllm`` logger, configured once per process."""

import logging
import sys

from vllm import envs

_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


def setup_logging(prefix: str = "") -> None:
    """Attach the project's handler to the ``vllm`` and ``vllm_ascend`` loggers.

    Idempotent: calling it again replaces the handler (the engine-core process sets a prefix).

    Args:
        prefix: Text put in front of every line, to tell the processes apart.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, _DATE_FORMAT))
    for name in ("vllm", "vllm_ascend"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(envs.VLLM_LOGGING_LEVEL)
        logger.propagate = False
