"""Threads that let others go first."""

import os
import threading

from vllm.logger import init_logger

logger = init_logger(__name__)


def lower_priority(by: int) -> None:
    """Let other threads go before this one, and before those that it starts.

    Args:
        by: Levels of niceness; each gives a tenth of the time less where others want it.
    """
    own = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + by)
    except (OSError, AttributeError):
        logger.debug("The priority of %s stays as it is.", threading.current_thread().name)
