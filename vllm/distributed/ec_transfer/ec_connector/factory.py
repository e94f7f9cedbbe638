"""Encoder-cache connectors by name; a module is imported when it is first asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar, cast

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ECConnectorFactory:
    """The registry of encoder-cache connectors."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector under the name the configuration uses.

        Raises:
            ValueError: The name is taken.
        """
        if name in cls._registry:
            raise ValueError(f"EC connector {name!r} is already registered: choose another name.")
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def create_connector(cls, config: VllmConfig, role: ECConnectorRole) -> ECConnectorBase:
        """Build one side of the configured connector.

        Raises:
            ConfigError: The configured name is not registered.
        """
        assert config.ec_transfer_config is not None
        name = config.ec_transfer_config.ec_connector
        if name not in cls._registry:
            raise ConfigError(
                f"EC connector {name!r} is unknown: use one of {', '.join(sorted(cls._registry))}."
            )
        module_path, class_name = cls._registry[name]
        connector_class = getattr(importlib.import_module(module_path), class_name)
        return cast("type[ECConnectorBase]", connector_class)(config, role)


ECConnectorFactory.register_connector(
    "ECExampleConnector",
    "vllm.distributed.ec_transfer.ec_connector.example_connector",
    "ECExampleConnector",
)
