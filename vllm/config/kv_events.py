"""Publishing of KV cache events."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm.exceptions import ConfigError

_FLAG = "kv-events-config"
_TRANSPORTS = ("tcp", "ipc", "inproc")
# sun_path of a Unix socket, with its end.
_MAX_IPC_PATH_BYTES = 107


@dataclass(frozen=True)
class KVEventsConfig:
    """Where KV cache events go.

    Attributes:
        enable_kv_cache_events: Whether events are made at all.
        publisher: "zmq" or "null"; None: zmq when enabled.
        endpoint: ZMQ address to publish on; one that names no single host binds.
        replay_endpoint: ZMQ address that answers replay requests, always bound; None: none.
        buffer_steps: Batches kept for replay.
        hwm: ZMQ high-water mark in messages; 0: none.
        max_queue_size: Batches waiting for the publisher thread; 0: no limit.
        topic: Subscription topic.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        if self.publisher not in ("zmq", "null"):
            raise ConfigError(
                f"KV events publisher {self.publisher!r} is unknown: use zmq or null."
            )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{_FLAG} {name}={getattr(self, name)} must be at least 0.")
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint:
                raise ConfigError(
                    f"{_FLAG} endpoint and replay_endpoint are both {self.endpoint!r}: they need "
                    "addresses of their own."
                )

    @property
    def publishes(self) -> bool:
        """Whether anything leaves the engine."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "KVEventsConfig":
        """Take the value of ``--kv-events-config``.

        Raises:
            ConfigError: A key is unknown, or a value is of the wrong type or out of range.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(raw) - set(known))
        if unknown:
            raise ConfigError(
                f"{_FLAG} has unknown keys {', '.join(map(repr, unknown))}: use {', '.join(known)}."
            )
        for name, value in raw.items():
            _check_type(name, value)
        return cls(**raw)


def _check_type(name: str, value: Any) -> None:
    if name in ("publisher", "replay_endpoint") and value is None:
        return
    kind: type = str
    wanted = "a string"
    if name == "enable_kv_cache_events":
        kind, wanted = bool, "true or false"
    elif name in ("buffer_steps", "hwm", "max_queue_size"):
        kind, wanted = int, "a whole number"
    # Not isinstance: true is no number.
    if type(value) is not kind:
        raise ConfigError(f"{_FLAG} {name}={value!r} must be {wanted}.")


def check_endpoint(name: str, endpoint: str) -> None:
    """Refuse a ZMQ address that can never be opened.

    Raises:
        ConfigError: It is none of tcp://host:port, ipc://path and inproc://name.
    """
    transport, separator, rest = endpoint.partition("://")
    if not separator or transport not in _TRANSPORTS or not rest:
        raise _bad_endpoint(name, endpoint, "is no ZMQ address")
    if transport == "tcp":
        _check_tcp(name, endpoint)
    elif transport == "ipc":
        if len(rest.encode()) > _MAX_IPC_PATH_BYTES:
            problem = f"has a path of more than {_MAX_IPC_PATH_BYTES} bytes"
            raise _bad_endpoint(name, endpoint, problem)
        if not rest.startswith("@") and not Path(rest).parent.is_dir():
            raise _bad_endpoint(name, endpoint, f"is in {str(Path(rest).parent)!r}, no folder")


def _check_tcp(name: str, endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host:
        raise _bad_endpoint(name, endpoint, "lacks a host or a port")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise _bad_endpoint(name, endpoint, f"has port {port!r}, which is not one of 1 to 65535")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if (":" in host and not is_bracketed) or any(c in "/@?#" or c.isspace() for c in host):
        raise _bad_endpoint(name, endpoint, f"has host {host!r}, which is none")


def _bad_endpoint(name: str, endpoint: str, problem: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG} {name}={endpoint!r} {problem}: write it like tcp://*:5557, tcp://router:5557 "
        "or ipc:///run/kv-events."
    )
