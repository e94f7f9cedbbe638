"""A Ray cluster on this machine, on the loopback interface alone."""

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_MIB = 1 << 20
# Ends a hang, and says nothing of speed.
_START_TIMEOUT_S = 600.0
# Ray reads them when it is imported, and hands them on to its own processes. The first makes it
# take loopback addresses as they are.
_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine takes longer than the half minute that is the default.
    "RAY_raylet_start_wait_time_s": "120",
    # Serve kills proxies that take five seconds to start, Ray workers that take a minute.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_worker_register_timeout_seconds": "300",
    # Ray's workers give way to everything else: other tests would starve them.
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "VLLM_CPU_KVCACHE_SPACE": "0.1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def ray_cluster(*num_cpus: int) -> Iterator[Any]:
    """Start nodes of so many CPUs by name; yields the cluster, which ends with the block.

    This process is no driver yet: ``ray.init(cluster.address)`` makes it one.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _SETTINGS.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {
            "object_store_memory": 80 * _MIB,
            "node_ip_address": "127.0.0.1",
        }
        head = {**node, "num_cpus": num_cpus[0], "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for count in num_cpus[1:]:
                cluster.add_node(**node, num_cpus=count)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def start_serve(port: int) -> None:
    """Start Serve with one proxy, on the first node; returns when that listens.

    Raises:
        TimeoutError: It does not.
    """
    from ray import serve

    deadline = time.monotonic() + _START_TIMEOUT_S
    # Serve itself waits a minute, which is too short on a busy machine; the proxy comes later.
    with contextlib.suppress(TimeoutError):
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError("Serve's proxy does not listen") from error
            time.sleep(0.1)
