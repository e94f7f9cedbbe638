"""A rank as a Ray actor; nothing here needs Ray."""

import pickle
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from vllm.platforms.resolve import get_current_platform
from vllm.utils.liveness import Effort, thread_effort_clock
from vllm.utils.ray_cluster import Environment, describe_environment
from vllm.v1.executor.messages import Answer, Failure, Order


class NodeInfo(NamedTuple):
    """Where an actor runs.

    Attributes:
        node_id: The machine.
        address: Its address in the cluster.
        free_port: A port that was free a moment ago.
        environment: What runs there.
    """

    node_id: str
    address: str
    free_port: int
    environment: Environment


class RankActor:
    """Carries out orders in one of its threads, and tells in another that it lives.

    Args:
        rank: For the log.

    Owns: its rank.
    """

    def __init__(self, rank: int) -> None:
        # First: a platform's plug-in may have to say how torch meets its device.
        get_current_platform()
        from vllm.v1.executor.rank_host import RankHost  # noqa: PLC0415  (see above)

        self._rank = rank
        self._host = RankHost()
        self._effort_clock: Callable[[], Effort] = Effort

    def carry_out(self, order: bytes) -> Answer | Failure:
        """See ``RankHost``; the order comes pickled, once for all ranks."""
        self._effort_clock = thread_effort_clock(threading.current_thread())
        loaded: Order = pickle.loads(order)
        return self._host.carry_out(loaded)

    def beat(self) -> float:
        """Return for how long the thread that carries out orders has used a core or wanted one."""
        return self._effort_clock().total_s

    def live(self) -> None:
        """Never return."""
        threading.Event().wait()

    def describe_node(self) -> NodeInfo:
        """Return where the actor runs, and a port to meet at."""
        import ray  # noqa: PLC0415  (optional: here it is there)

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return NodeInfo(
                ray.get_runtime_context().get_node_id(),
                address,
                probe.getsockname()[1],
                describe_environment(address),
            )
