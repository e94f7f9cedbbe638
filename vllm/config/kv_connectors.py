"""Where KV connectors are, by name: known before any of them is imported.

The table lies here, below the connectors, because a configuration resolves its defaults by what its
connector can do.
"""

import importlib
from typing import Any, ClassVar

from vllm.config.kv_transfer import KVTransferConfig
from vllm.exceptions import ConfigError

_EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
_HANDOVER = "vllm.distributed.kv_transfer.handover."
_OFFLOADING = "vllm.v1.kv_offload."


class KVConnectorRegistry:
    """Class-level table of connectors; there is one per process."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {
        "ExampleConnector": (_EXAMPLE, "ExampleConnector"),
        "NeighbourConnector": (_HANDOVER + "neighbours", "NeighbourConnector"),
        "TcpConnector": (_HANDOVER + "connector", "TcpConnector"),
        "MooncakeConnector": (_HANDOVER + "mooncake", "MooncakeConnector"),
        "MultiConnector": (_MULTI, "MultiConnector"),
        "OffloadingConnector": (_OFFLOADING + "connector", "OffloadingConnector"),
    }

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector; its module is imported when it is first asked for.

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
    def load_class(cls, config: KVTransferConfig) -> type[Any]:
        """Import and return the class a configuration names.

        Raises:
            ConfigError: It names none, one that is not registered, or one that is not there.
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
        try:
            module = importlib.import_module(module_path)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"KV connector {name!r}: its module {module_path!r} cannot be imported ({error}): "
                "set kv_connector_module_path to one that this Python finds."
            ) from error
        connector_class = getattr(module, class_name, None)
        if not isinstance(connector_class, type):
            raise ConfigError(f"Module {module_path} has no KV connector {class_name!r}.")
        return connector_class

    @classmethod
    def moves_checkpoints(cls, config: KVTransferConfig) -> bool:
        """Whether the connector moves prefixes of caches that hit at one unit."""
        if not cls.is_known(config):
            return False
        return bool(getattr(cls.load_class(config), "moves_checkpoints", False))

    @classmethod
    def handles_all_groups(cls, config: KVTransferConfig) -> bool:
        """Whether the connector takes several KV cache groups; an unknown one decides nothing."""
        if not cls.is_known(config):
            return True
        # What SupportsHMA, which lies above, requires of those that do.
        return hasattr(cls.load_class(config), "request_finished_all_groups")
