"""A Ray cluster of two nodes on this machine, on the loopback interface alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_MIB = 1 << 20
# Ray reads them when it is imported, and hands them on to its own processes. The first makes it
# take loopback addresses as they are.
_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine takes longer than the half minute that is the default.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "VLLM_CPU_KVCACHE_SPACE": "0.1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def ray_cluster(num_cpus: int = 2) -> Iterator[Any]:
    """Start two nodes of so many CPUs by name; yields the cluster, which ends with the block.

    This process is no driver yet: ``ray.init(cluster.address)`` makes it one.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _SETTINGS.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {
            "num_cpus": num_cpus,
            "object_store_memory": 80 * _MIB,
            "node_ip_address": "127.0.0.1",
        }
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
