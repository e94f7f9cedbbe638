"""Ray, where it is installed: it is no dependency."""

import signal
import threading
from typing import Any

from vllm.exceptions import ConfigError

# What a process elsewhere must know of this one's environment.
PASSED_ON = ("VLLM_", "OMP_", "GOMP_", "GLOO_", "NCCL_", "HCCL_", "TP_SOCKET_")


def connect_ray(flag: str) -> Any:
    """Return the module, connected to the cluster of RAY_ADDRESS.

    Without the variable to a cluster that this machine is part of, else to one of this machine
    alone, which ends with the process.

    Args:
        flag: What asked for it, for the error.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import ray  # noqa: PLC0415  (optional)
        import ray.util.scheduling_strategies  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ConfigError(
            f"{flag}='ray' needs the package ray, which is not installed: pip install ray, or use "
            "mp on one machine."
        ) from error
    if not ray.is_initialized():
        handlers = _read_handlers()
        ray.init(include_dashboard=False, log_to_driver=True, logging_level="warning")
        for number, handler in handlers.items():
            # Ray exits on SIGTERM; here the front end decides when to stop.
            signal.signal(number, handler)
    return ray


def _read_handlers() -> dict[int, Any]:
    """Return what this process does on signals; nothing off the main thread, which may not ask."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
