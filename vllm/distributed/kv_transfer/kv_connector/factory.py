"""Building KV connectors by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVConnectorFactory(KVConnectorRegistry):
    """The registry of KV connectors, and their construction."""

    @classmethod
    def get_connector_class(cls, config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """Return the class a configuration names.

        Raises:
            ConfigError: It names none, or one that is not registered.
        """
        return cast("type[KVConnectorBase_V1]", cls.load_class(config))

    @classmethod
    def check_before_load(cls, config: VllmConfig) -> None:
        """Let the configured connector, if any, refuse what cannot work.

        Raises:
            ConfigError: It does.
        """
        transfer = config.kv_transfer_config
        if transfer is not None and transfer.kv_connector is not None:
            cls.get_connector_class(transfer).check_before_load(config)

    @classmethod
    def create_connector(
        cls,
        config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """Build one side of the configured connector."""
        assert config.kv_transfer_config is not None
        connector_class = cls.get_connector_class(config.kv_transfer_config)
        return connector_class(config, role, kv_cache_config)
