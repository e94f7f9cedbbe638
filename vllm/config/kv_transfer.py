"""KV connectors: moving KV blocks in and out of this engine."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVTransferConfig:
    """A KV connector and its role."""

    kv_connector: str | None = None
    kv_role: str | None = None
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: str = "fail"
    engine_id: str | None = None

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """Return an extra setting of the connector."""
        return self.kv_connector_extra_config.get(key, default)


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
