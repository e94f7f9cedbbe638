"""KV connectors: moving KV blocks in and out of this engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from vllm.exceptions import ConfigError

_FLAG = "kv-transfer-config"
KV_ROLES = ("kv_producer", "kv_consumer", "kv_both")
# When the disk tier of the offloading connector gets what was computed.
WRITE_THROUGH = "write_through"
SELECTIVE = "write_through_selective"
WRITE_BACK = "write_back"
WRITE_POLICIES = (WRITE_THROUGH, SELECTIVE, WRITE_BACK)
# Prefixes that it brings back at a start, at most.
MAX_WARM = 256
OFFLOADING_CONNECTOR = "OffloadingConnector"
MULTI_CONNECTOR = "MultiConnector"
LOAD_FAILURE_POLICIES = ("recompute", "fail")
# Of an engine's name; replicas add a suffix to it.
_MAX_NAME_CHARS = 200
_TYPES: Mapping[str, type] = {
    "kv_connector": str,
    "kv_role": str,
    "kv_connector_extra_config": dict,
    "kv_connector_module_path": str,
    "enable_permute_local_kv": bool,
    "kv_load_failure_policy": str,
    "engine_id": str,
    "kv_ip": str,
    "kv_port": int,
}
# Known elsewhere; they say nothing that this server would do otherwise.
_NO_EFFECT = ("kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_buffer_device")


@dataclass
class KVTransferConfig:
    """A KV connector and its role.

    Attributes:
        kv_connector: Its name.
        kv_role: "kv_producer" (prefills for others), "kv_consumer" or "kv_both".
        kv_connector_extra_config: Its own settings.
        kv_connector_module_path: Where its class is, if it is not a registered one.
        enable_permute_local_kv: Interface only.
        kv_load_failure_policy: "recompute" or "fail": what becomes of a request whose KV does not
            come. The flag's default is recompute.
        engine_id: This engine's name for others; the flag's default is a random one.
        kv_ip: Address on which it answers other engines.
        kv_port: Port on which it does; replica i of a data-parallel engine takes ``kv_port + i``.
        instance_id: This run of the engine.
    """

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "fail"
    engine_id: str | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    instance_id: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "KVTransferConfig":
        """Take the value of ``--kv-transfer-config``.

        Raises:
            ConfigError: A key is unknown or missing, or a value is of the wrong type or range.
        """
        unknown = sorted(set(raw) - set(_TYPES) - set(_NO_EFFECT))
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise ConfigError(f"{_FLAG} has unknown keys {names}: use {', '.join(_TYPES)}.")
        for name, kind in _TYPES.items():
            # Not isinstance: true is no number.
            if name in raw and type(raw[name]) is not kind:
                raise ConfigError(f"{_FLAG} {name}={raw[name]!r} must be a {kind.__name__}.")
        for name, known in (
            ("kv_role", KV_ROLES),
            ("kv_load_failure_policy", LOAD_FAILURE_POLICIES),
        ):
            if raw.get(name, known[0]) not in known:
                raise ConfigError(f"{_FLAG} {name}={raw[name]!r}: use one of {', '.join(known)}.")
        for name in ("kv_connector", "kv_role"):
            if name not in raw:
                raise ConfigError(f"{_FLAG} has no {name}: set it.")
        config = cls(**{name: raw[name] for name in _TYPES if name in raw})
        if not 1 <= config.kv_port <= 65535:
            raise ConfigError(f"{_FLAG} kv_port={config.kv_port} is no port: use 1 to 65535.")
        named = config.engine_id
        if named is not None and not (0 < len(named) <= _MAX_NAME_CHARS and named.isprintable()):
            raise ConfigError(
                f"{_FLAG} engine_id={named[:60]!r} must have 1 to {_MAX_NAME_CHARS} printable "
                "characters."
            )
        config.kv_load_failure_policy = raw.get("kv_load_failure_policy", "recompute")
        config.engine_id = config.engine_id or f"engine-{config.instance_id[:8]}"
        return config

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine prefills for others."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine takes what others prefilled."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def source(self) -> str:
        """Where lies what the connector loads, as metrics call it."""
        return "disk" if self.kv_connector == OFFLOADING_CONNECTOR else "external_unspecified"

    @property
    def has_tiers(self) -> bool:
        """Whether the connector keeps what the pool gives up."""
        return self.kv_connector == OFFLOADING_CONNECTOR or any(
            child.kv_connector == OFFLOADING_CONNECTOR for child in child_configs(self)
        )

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """Return an extra setting of the connector."""
        return self.kv_connector_extra_config.get(key, default)


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Return the connectors that a ``MultiConnector`` joins; of another connector none.

    They go by its engine's name and run, so that each core of several has its own.

    Raises:
        ConfigError: An entry is malformed, or joins connectors itself.
    """
    if config.kv_connector != MULTI_CONNECTOR:
        return []
    listed = config.kv_connector_extra_config.get("connectors", [])
    if not (isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed)):
        raise ConfigError(f"{_FLAG} connectors={listed!r} must be a list of objects.")
    children = []
    for entry in listed:
        child = KVTransferConfig.from_dict(entry)
        if child.kv_connector == MULTI_CONNECTOR:
            raise ConfigError(f"{_FLAG} {MULTI_CONNECTOR} joins no other {MULTI_CONNECTOR}.")
        child.engine_id = config.engine_id
        child.instance_id = config.instance_id
        children.append(child)
    return children


def join_configs(
    *configs: KVTransferConfig, named: KVTransferConfig | None = None
) -> KVTransferConfig:
    """Return a ``MultiConnector`` of some connectors; of equal offers the first one's is taken.

    Args:
        configs: Of the connectors.
        named: Whose engine's name and policy of failures it has; None: the first one's.
    """
    listed = [
        {name: value for name in _TYPES if (value := getattr(config, name)) is not None}
        for config in configs
    ]
    return replace(
        named or configs[0],
        kv_connector=MULTI_CONNECTOR,
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": listed},
        kv_connector_module_path=None,
    )


@dataclass
class ECTransferConfig:
    """An encoder-cache connector and its role."""

    ec_connector: str | None = None
    ec_role: str | None = None
    ec_connector_extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_ec_producer(self) -> bool:
        """Whether this engine gives encoder outputs away."""
        return self.ec_role in ("ec_producer", "ec_both")

    @property
    def is_ec_consumer(self) -> bool:
        """Whether this engine takes encoder outputs."""
        return self.ec_role in ("ec_consumer", "ec_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """Return an extra setting of the connector."""
        return self.ec_connector_extra_config.get(key, default)
