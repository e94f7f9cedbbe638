"""Engine cores on the machines of a Ray cluster.

An actor starts the core as a process of its machine, as a front end starts one of its own, and
holds its lifeline: with the actor the core ends. Messages go over encrypted TCP, not through Ray.
"""

import os
import pickle
import subprocess
from typing import IO, Any

from vllm import platforms
from vllm.config import VllmConfig
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.ray_cluster import (
    PASSED_ON,
    Environment,
    check_environments,
    connect_ray,
    describe_environment,
)
from vllm.utils.ray_room import Asked, await_room, needs_of
from vllm.v1.engine.core_proc import LaunchOrder
from vllm.v1.engine.process_client import ProcessCore, spawn_process

logger = init_logger(__name__)

# An actor's process starts, and imports this package: on a busy machine, with many at once.
_START_TIMEOUT_S = 300.0
_CALL_TIMEOUT_S = 10.0


class CoreHost:
    """Runs in an actor: keeps one core process.

    Owns: the process.

    Args:
        order: A pickled LaunchOrder.
    """

    def __init__(self, order: bytes) -> None:
        self._process = spawn_process(pickle.loads(order))

    def get_pid(self) -> int:
        """Return the process id, on the actor's machine."""
        return self._process.pid

    def describe(self) -> Environment:
        """Return what runs on the actor's machine."""
        import ray  # noqa: PLC0415  (optional: here it is there)

        return describe_environment(ray.util.get_node_ip_address())

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None) -> int | None:
        """Return the exit status; None if it still runs after ``timeout`` seconds."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def kill(self) -> None:
        """End it by force."""
        self._process.kill()


class RayProcess:
    """A core process on some machine, as the front end sees it; see ``CoreProcess``.

    Owns: its actor.

    Args:
        ray: The module.
        order: What the core shall run.

    Raises:
        ConfigError: The cluster has no room for it, or other versions.
    """

    # The actor holds the other end of its lifeline.
    stdin: IO[bytes] | None = None

    def __init__(self, ray: Any, order: LaunchOrder) -> None:
        self._ray = ray
        self._code: int | None = None
        parallel = order.vllm_config.parallel_config
        needs = needs_of(parallel.world_size, platforms.current_platform.ray_device_key)
        _await_place(ray, needs, parallel)
        self._actor = _make_actor(ray, needs).remote(pickle.dumps(order))
        try:
            self.pid: int = ray.get(self._actor.get_pid.remote(), timeout=_START_TIMEOUT_S)
            check_environments([ray.get(self._actor.describe.remote(), timeout=_CALL_TIMEOUT_S)])
        except ConfigError:
            ray.kill(self._actor, no_restart=True)
            raise
        except ray.exceptions.RayActorError as error:
            raise ConfigError(
                f"Engine core {parallel.data_parallel_rank} cannot start on its machine of the Ray "
                f"cluster: {error}. Every node must be started from an environment that has this "
                "package."
            ) from error
        except ray.exceptions.GetTimeoutError as error:
            ray.kill(self._actor, no_restart=True)
            raise ConfigError(
                f"The actor of engine core {parallel.data_parallel_rank} did not start on the Ray "
                f"cluster within {_START_TIMEOUT_S:g} s, although there was room for it: see the "
                "log of its machine (raylet.err in /tmp/ray/session_latest/logs)."
            ) from error

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._ask(self._actor.poll, _CALL_TIMEOUT_S)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            TimeoutExpired: It still runs.
        """
        limit = _CALL_TIMEOUT_S if timeout is None else timeout
        code = self._ask(self._actor.wait, limit + _CALL_TIMEOUT_S, limit)
        if code is None:
            raise subprocess.TimeoutExpired("engine core", limit)
        return code

    def kill(self) -> None:
        """End it by force, its actor too."""
        if self._code is None:
            self._ask(self._actor.kill, _CALL_TIMEOUT_S)
            self._code = self._code if self._code is not None else -9
            self._ray.kill(self._actor, no_restart=True)

    def _ask(self, method: Any, timeout: float, *arguments: Any) -> int | None:
        """Call the actor; one that is gone, or its machine, has taken the core along."""
        if self._code is not None:
            return self._code
        exceptions = self._ray.exceptions
        try:
            code: int | None = self._ray.get(method.remote(*arguments), timeout=timeout)
        except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
            logger.error("The actor of an engine core is gone: %s", error)
            code = 1
        self._code = code
        return code


def _await_place(ray: Any, needs: dict[str, float], parallel: ParallelConfig) -> None:
    """Wait until the cluster could place a core: hold a place for a moment, and let it go.

    The place itself is not kept: cores shall spread over the machines, one after another.

    Raises:
        ConfigError: It cannot.
    """
    asked = Asked(
        f"engine core {parallel.data_parallel_rank} of {parallel.data_parallel_size} with "
        f"{parallel.world_size} workers",
        needs,
        1,
        "lower --data-parallel-size or --tensor-parallel-size",
    )
    group = ray.util.placement_group([needs])
    try:
        await_room(ray, asked, group.wait)
    finally:
        ray.util.remove_placement_group(group)


def _make_actor(ray: Any, needs: dict[str, float]) -> Any:
    options: dict[str, Any] = {
        "max_restarts": 0,
        "scheduling_strategy": "SPREAD",
        "runtime_env": {
            "env_vars": {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        },
        "num_cpus": needs["CPU"],
        "num_gpus": needs.get("GPU", 0),
        "resources": {key: needs[key] for key in needs if key not in ("CPU", "GPU")},
    }
    return ray.remote(CoreHost).options(**options)


def launch_ray_core(vllm_config: VllmConfig, core_factory: str) -> ProcessCore:
    """Start a core on the cluster of RAY_ADDRESS, and return at once.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room.
    """
    ray = connect_ray("data_parallel_backend")
    host = vllm_config.parallel_config.data_parallel_address
    return ProcessCore(
        vllm_config, core_factory, tcp_host=host, spawn=lambda order: RayProcess(ray, order)
    )
