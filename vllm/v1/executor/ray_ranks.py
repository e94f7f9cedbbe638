"""Ranks as actors of a Ray cluster, on as many machines as it has."""

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from vllm import envs, platforms
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import WorkerPlace
from vllm.exceptions import ConfigError, EngineDeadError
from vllm.logger import init_logger
from vllm.utils.liveness import beat_interval_s
from vllm.utils.ray_cluster import PASSED_ON, check_environments, connect_ray
from vllm.utils.ray_room import Asked, await_room, needs_of
from vllm.v1.executor.messages import STEP_ORDERS, Beat, Failure, Order, rebuild_failure
from vllm.v1.executor.rank_watch import OWN_SHARE, RankWatch
from vllm.v1.executor.ray_actor import NodeInfo, RankActor

logger = init_logger(__name__)


class RayRanks:
    """One actor per rank; they go with the job of this process, however it ends.

    Args:
        ray: The module.
        config: How many, and what they need.
        timeout_s: Seconds without life that mean death, of a rank that runs a step.

    Raises:
        ConfigError: The cluster has no room for them.

    Owns: the actors and their placement group.
    """

    def __init__(self, ray: Any, config: VllmConfig, timeout_s: float) -> None:
        self._ray = ray
        self._timeout_s = timeout_s
        self._closed = False
        size = config.parallel_config.world_size
        key = platforms.current_platform.ray_device_key
        needs = needs_of(1, key)
        self._group = ray.util.placement_group([needs] * size, strategy="PACK")
        self._actors: list[Any] = []
        try:
            self._await_room(needs, size)
            self._actors = [self._make_actor(rank, key) for rank in range(size)]
            nodes = self._describe_nodes()
        except BaseException:
            self.close()
            raise
        self.places = find_places(nodes)
        # Never answered: that one is means that its actor is gone.
        self._lives = [actor.live.remote() for actor in self._actors]

    def _describe_nodes(self) -> list[NodeInfo]:
        try:
            nodes: list[NodeInfo] = self._ray.get(
                [actor.describe_node.remote() for actor in self._actors]
            )
        except self._ray.exceptions.RayActorError as error:
            raise ConfigError(
                f"A worker cannot start on its machine of the Ray cluster: {error}. Every node "
                "must be started from an environment that has this package."
            ) from error
        check_environments([node.environment for node in nodes])
        return nodes

    def _await_room(self, needs: dict[str, float], size: int) -> None:
        cure = "lower --tensor-parallel-size"
        await_room(self._ray, Asked(f"{size} workers", needs, size, cure), self._group.wait)

    def _make_actor(self, rank: int, key: str) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=rank
        )
        passed = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_restarts": 0,
            # An order, a beat, and what tells of the end.
            "max_concurrency": 3,
            "scheduling_strategy": strategy,
            # A cluster shows its jobs' environments to whoever may look.
            "runtime_env": {"env_vars": {k: v for k, v in passed.items() if k != _SECRET}},
        }
        if key == "GPU":
            options["num_gpus"] = 1
        elif key not in ("", "CPU"):
            options["resources"] = {key: 1}
        return self._ray.remote(RankActor).options(**options).remote(rank)

    def order(self, orders: Sequence[Order]) -> list[Any]:
        """See ``Ranks``."""
        try:
            return self._order(orders)
        except BaseException:
            # One is lost: the others wait for it in a collective, and cannot go on without it.
            self.close()
            raise

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Return False: actors speak when they are asked."""
        return False

    def _order(self, orders: Sequence[Order]) -> list[Any]:
        is_one = all(order is orders[0] for order in orders)
        shared = self._ray.put(pickle.dumps(orders[0])) if is_one else None
        pending = {
            actor.carry_out.remote(shared or pickle.dumps(order)): rank
            for rank, (actor, order) in enumerate(zip(self._actors, orders, strict=True))
        }
        watch = RankWatch(pending.values(), self._timeout_s * OWN_SHARE)
        beats: dict[Any, int] = {}
        answers: dict[int, Any] = {}
        while pending:
            waiting = [*pending, *beats]
            ready, _ = self._ray.wait(waiting, timeout=beat_interval_s(self._timeout_s))
            for ref in ready:
                if ref in beats:
                    rank = beats.pop(ref)
                    watch.saw_beat(rank, Beat(self._get(rank, ref)))
                else:
                    rank = pending.pop(ref)
                    answers[rank] = self._take_answer(rank, ref)
                    watch.saw_answer(rank)
            if isinstance(orders[0], STEP_ORDERS) and not ready:
                if fault := watch.find_fault():
                    raise EngineDeadError(fault)
                asked = set(beats.values())
                beats |= {
                    self._actors[rank].beat.remote(): rank
                    for rank in pending.values()
                    if rank not in asked
                }
        return [answers[rank] for rank in range(len(self._actors))]

    def _take_answer(self, rank: int, ref: Any) -> Any:
        value = self._get(rank, ref)
        if isinstance(value, Failure):
            # Of a collective that broke the rank that is gone is the cause.
            if fault := self.find_fault():
                raise EngineDeadError(fault)
            raise rebuild_failure(rank, value)
        return value.value

    def _get(self, rank: int, ref: Any) -> Any:
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            raise EngineDeadError(f"rank {rank}'s actor is gone") from error

    def find_fault(self) -> str | None:
        """See ``Ranks``."""
        if self._closed:
            return None
        gone, _ = self._ray.wait(self._lives, timeout=0)
        return f"rank {self._lives.index(gone[0])}'s actor is gone" if gone else None

    def close(self) -> None:
        """See ``Ranks``."""
        if self._closed:
            return
        self._closed = True
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._ray.util.remove_placement_group(self._group)


_SECRET = "VLLM_API_KEY"


def find_places(nodes: Sequence[NodeInfo]) -> list[WorkerPlace]:
    """Return where ranks stand, by the machine of each; they meet on the first one's."""
    names = [node.node_id for node in nodes]
    meeting = f"tcp://{nodes[0].address}:{nodes[0].free_port}"
    return [
        # Ray shows each actor its own device alone, which then is the first.
        WorkerPlace(rank, len(nodes), 0, names.count(name), meeting)
        for rank, name in enumerate(names)
    ]


def start_ray_ranks(config: VllmConfig) -> RayRanks:
    """Start the ranks that a configuration asks for, on the cluster of RAY_ADDRESS.

    Without the variable on a cluster that this machine is part of, else on one of this machine
    alone, which ends with the process.

    Raises:
        ConfigError: Ray is not installed, or the cluster has no room.
    """
    ray = connect_ray("distributed_executor_backend")
    return RayRanks(ray, config, envs.VLLM_ENGINE_HEARTBEAT_TIMEOUT)
