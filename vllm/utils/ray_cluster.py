"""Ray, where it is installed: it is no dependency."""

import os
import platform
import signal
import threading
from importlib.util import find_spec
from typing import Any, NamedTuple

from vllm.exceptions import ConfigError
from vllm.version import __version__

# What a process elsewhere must know of this one's environment.
PASSED_ON = ("VLLM_", "OMP_", "GOMP_", "GLOO_", "NCCL_", "HCCL_", "TP_SOCKET_")


class Environment(NamedTuple):
    """What runs on a machine of the cluster; there as here, or processes misunderstand each other.

    Attributes:
        machine: Its address in the cluster.
        vllm: Version of this package.
        python: Version of Python.
    """

    machine: str
    vllm: str
    python: str


def describe_environment(machine: str) -> Environment:
    """Return what runs here."""
    return Environment(machine, __version__, platform.python_version())


def check_environments(found: list[Environment]) -> None:
    """Refuse machines on which something else runs than here.

    Raises:
        ConfigError: Names the first such machine, and what it has.
    """
    own = describe_environment("")
    for there in found:
        if there[1:] != own[1:]:
            raise ConfigError(
                f"The machine {there.machine} of the Ray cluster runs vllm {there.vllm} on Python "
                f"{there.python}, this one vllm {own.vllm} on Python {own.python}: start the "
                "cluster's nodes from the same environment."
            )


def check_ray(flag: str) -> None:
    """Refuse what needs Ray where it is not installed; imports nothing.

    Raises:
        ConfigError: It is not.
    """
    if find_spec("ray") is None:
        raise ConfigError(
            f"{flag}='ray' needs the package ray, which is not installed: pip install 'vllm[ray]', "
            "or use mp on one machine."
        )


def connect_ray(flag: str) -> Any:
    """Return the module, connected to the cluster of RAY_ADDRESS.

    Without the variable to a cluster that this machine is part of, else to one of this machine
    alone, which ends with the process.

    Args:
        flag: What asked for it, for the error.

    Raises:
        ConfigError: It is not installed, nobody answers at the address, or the cluster runs other
            versions of Ray or Python.
    """
    check_ray(flag)
    import ray  # noqa: PLC0415  (optional)
    import ray.util.scheduling_strategies  # noqa: PLC0415  (optional)

    if not ray.is_initialized():
        handlers = _read_handlers()
        try:
            ray.init(include_dashboard=False, log_to_driver=True, logging_level="warning")
        except (RuntimeError, ConnectionError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigError(
                f"{flag}='ray': the Ray cluster of RAY_ADDRESS={address} cannot be joined: {error}"
            ) from error
        for number, handler in handlers.items():
            # Ray exits on SIGTERM; here the front end decides when to stop.
            signal.signal(number, handler)
    return ray


def _read_handlers() -> dict[int, Any]:
    """Return what this process does on signals; nothing off the main thread, which may not ask."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
