"""KV connectors by name; a connector's module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVConnectorFactory:
    """The registry of KV connectors."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector.

        Args:
            name: What ``kv_connector`` in the configuration calls it.
            module_path: Dotted name of its module.
            class_name: Its class there.

        Raises:
            ValueError: The name is taken.
        """
        if name in cls._registry:
            raise ValueError(f"KV connector {name!r} is already registered: choose another name.")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def is_known(cls, config: KVTransferConfig) -> bool:
        """Whether a configuration says where its connector is."""
        if config.kv_connector is None:
            return False
        return config.kv_connector_module_path is not None or config.kv_connector in cls._registry

    @classmethod
    def get_connector_class(cls, config: KVTransferConfig) -> type[KVConnectorBase_V1]:
        """Return the class a configuration names.

        Raises:
            ConfigError: It names none, or one that is not registered.
        """
        name = config.kv_connector
        if name is None:
            raise ConfigError("kv_transfer_config names no kv_connector: set one.")
        if config.kv_connector_module_path is not None:
            location = (config.kv_connector_module_path, name)
        elif name in cls._registry:
            location = cls._registry[name]
        else:
            known = ", ".join(sorted(cls._registry))
            raise ConfigError(
                f"KV connector {name!r} is unknown: use one of {known}, or give "
                "kv_connector_module_path."
            )
        module_path, class_name = location
        connector_class = getattr(importlib.import_module(module_path), class_name, None)
        if connector_class is None:
            raise ConfigError(f"Module {module_path} has no KV connector {class_name!r}.")
        return cast("type[KVConnectorBase_V1]", connector_class)

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


KVConnectorFactory.register_connector(
    "ExampleConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "ExampleConnector",
)
