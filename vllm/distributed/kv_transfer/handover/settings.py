"""The connector's own settings, from ``--kv-transfer-config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.handover.pulling import PullTimeouts
from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

_MOONCAKE = "MooncakeConnector"
_NEIGHBOUR = "NeighbourConnector"
_LAST_PORT = 65535
_ANY_ADDRESS = ("", "0.0.0.0", "::")
_SECONDS = {
    "lease_timeout_s": 120.0,
    "load_timeout_s": 30.0,
    "quiet_timeout_s": 5.0,
    "stuck_timeout_s": 2.0,
    # The front end gives an engine core five seconds to stop.
    "drain_timeout_s": 3.0,
}


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """What the Mooncake transfer engine is told.

    Attributes:
        protocol: "tcp" or "rdma".
        device_name: Of the network; empty: it chooses.
        buffer_bytes: Of the buffer into which holders write.
    """

    protocol: str = "tcp"
    device_name: str = ""
    buffer_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class HandoverSettings:
    """What an operator may say.

    Attributes:
        host: Address to listen on, and told to other engines.
        port: Of this core's first worker; its rank r answers on ``port + r``.
        can_give: Whether it prefills for others.
        can_take: Whether it takes prefixes from others.
        lease_timeout_s: How long a prefix is held that nobody asks for.
        load_timeout_s: How long a request waits for its prefix.
        timeouts: How long a load waits for less.
        drain_timeout_s: How long an engine that shuts down holds what others may still pull.
        peers: Holders, as (host, port), to be compared with at start.
        mooncake: Of the Mooncake transfer engine, where it is used.
        leaves_requests: Whether what requests ask of a transfer is another connector's.
    """

    host: str
    port: int
    can_give: bool
    can_take: bool
    lease_timeout_s: float
    load_timeout_s: float
    timeouts: PullTimeouts
    drain_timeout_s: float
    peers: tuple[tuple[str, int], ...]
    mooncake: MooncakeSettings
    leaves_requests: bool = False


def read_settings(config: VllmConfig) -> HandoverSettings:
    """Read and check the settings; loads nothing.

    Raises:
        ConfigError: One is unknown or out of range, or the engine cannot hand prefixes over.
    """
    transfer = config.kv_transfer_config
    assert transfer is not None
    _check_parallel(transfer, config.parallel_config)
    if transfer.is_kv_producer and not config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"kv_role {transfer.kv_role!r} gives away what the prefix cache holds, but prefix "
            "caching is off: leave --no-enable-prefix-caching out."
        )
    extra = dict(transfer.kv_connector_extra_config)
    peers = _read_peers(extra.pop("peers", []))
    seconds = {n: _read_seconds(n, extra.pop(n, default)) for n, default in _SECONDS.items()}
    mooncake = _read_mooncake(extra) if transfer.kv_connector == _MOONCAKE else MooncakeSettings()
    # Set by the engine itself, where another connector transfers besides.
    is_between = transfer.kv_connector == _NEIGHBOUR
    leaves_requests = is_between and extra.pop("leaves_requests", False) is True
    if extra:
        known = ", ".join(["peers", *_SECONDS])
        names = ", ".join(map(repr, sorted(extra)))
        raise ConfigError(f"kv_connector_extra_config has unknown keys {names}: use {known}.")
    return HandoverSettings(
        transfer.kv_ip,
        _find_port(transfer, config.parallel_config),
        transfer.is_kv_producer,
        transfer.is_kv_consumer,
        seconds["lease_timeout_s"],
        seconds["load_timeout_s"],
        PullTimeouts(seconds["quiet_timeout_s"], seconds["stuck_timeout_s"]),
        seconds["drain_timeout_s"],
        peers,
        mooncake,
        leaves_requests,
    )


def _check_parallel(transfer: KVTransferConfig, parallel: ParallelConfig) -> None:
    if parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            f"kv-transfer-config goes with pipeline_parallel_size=1, not with "
            f"{parallel.pipeline_parallel_size}: use tensor_parallel_size."
        )
    on_ray = {
        "--distributed-executor-backend": parallel.distributed_executor_backend == "ray",
        "--data-parallel-backend": parallel.data_parallel_backend == "ray"
        and parallel.data_parallel_size > 1,
    }
    for flag, is_ray in on_ray.items():
        if is_ray and transfer.is_kv_producer:
            raise ConfigError(
                f"--kv-transfer-config with kv_role {transfer.kv_role!r} and {flag} ray: all "
                "workers answer on kv_ip, and Ray may place them on other machines: use mp."
            )
    if transfer.is_kv_producer and transfer.kv_ip in _ANY_ADDRESS:
        raise ConfigError(
            f"kv-transfer-config kv_ip={transfer.kv_ip!r} is where other engines are sent for KV: "
            "set an address of this machine that they can reach."
        )


def _find_port(transfer: KVTransferConfig, parallel: ParallelConfig) -> int:
    num_workers = parallel.world_size
    num_ports = num_workers * parallel.data_parallel_size
    if transfer.is_kv_producer and transfer.kv_port + num_ports - 1 > _LAST_PORT:
        raise ConfigError(
            f"kv-transfer-config kv_port={transfer.kv_port} leaves no room below {_LAST_PORT} for "
            f"a port of each of {num_ports} workers: set a lower one."
        )
    return transfer.kv_port + parallel.data_parallel_index * num_workers


def _read_mooncake(extra: dict[str, Any]) -> MooncakeSettings:
    default = MooncakeSettings()
    protocol = extra.pop("protocol", default.protocol)
    if protocol not in ("tcp", "rdma"):
        raise ConfigError(f"kv_connector_extra_config protocol={protocol!r}: use tcp or rdma.")
    device_name = extra.pop("device_name", default.device_name)
    if not isinstance(device_name, str):
        raise ConfigError(f"kv_connector_extra_config device_name={device_name!r} is no text.")
    num_bytes = extra.pop("buffer_bytes", default.buffer_bytes)
    if type(num_bytes) is not int or not 1 << 20 <= num_bytes <= 1 << 36:
        raise ConfigError(
            f"kv_connector_extra_config buffer_bytes={num_bytes!r} must be 1 MiB to 64 GiB."
        )
    return MooncakeSettings(protocol, device_name, num_bytes)


def _read_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise ConfigError(
            f"kv_connector_extra_config {name}={value!r} must be a number of seconds, above 0 and "
            "at most a day."
        )
    return float(value)


def _read_peers(peers: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(peers, list):
        raise ConfigError(
            f'kv_connector_extra_config peers={peers!r} is no list: write ["host:port", ...].'
        )
    return tuple(map(_read_peer, peers))


def _read_peer(text: Any) -> tuple[str, int]:
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"kv_connector_extra_config peers holds {text!r}: write host:port of a kv_producer."
        )
    return host, int(port)
