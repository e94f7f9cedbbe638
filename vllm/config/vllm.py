"""All configuration of one engine, together."""

from dataclasses import dataclass, field
from typing import Any

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.device import DeviceConfig
from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import ECTransferConfig, KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import ConfigError


@dataclass
class VllmConfig:
    """Everything an engine is built from. Holds the given objects by reference.

    A hybrid KV cache manager that was neither asked for nor refused is on, unless the KV connector
    handles a single group only.

    Raises:
        ConfigError: Two configurations do not go together.
    """

    model_config: ModelConfig = None  # type: ignore[assignment]
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    kv_transfer_config: KVTransferConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    # Whether the platform may choose what drafts: nobody asked for drafts, or for none.
    may_draft: bool = False
    ec_transfer_config: ECTransferConfig | None = None
    kv_events_config: KVEventsConfig | None = None
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    multimodal_config: MultiModalConfig = field(default_factory=MultiModalConfig)
    lora_config: Any = None
    use_v2_model_runner: bool = False

    def __post_init__(self) -> None:
        scheduler_config = self.scheduler_config
        if scheduler_config.disable_hybrid_kv_cache_manager is None:
            transfer = self.kv_transfer_config
            scheduler_config.disable_hybrid_kv_cache_manager = (
                transfer is not None and not KVConnectorRegistry.handles_all_groups(transfer)
            )
        # Not of stand-ins: code from outside builds one for the few fields it needs.
        if isinstance(self.model_config, ModelConfig) and self.model_config.hits_at_units:
            self.check_unit_hits()

    def check_unit_hits(self) -> None:
        """Refuse what a cache that hits at one unit cannot do.

        Raises:
            ConfigError: A KV connector is configured that moves blocks alone.
        """
        transfer = self.kv_transfer_config
        if transfer is None or transfer.kv_connector is None:
            return
        if not KVConnectorRegistry.moves_checkpoints(transfer):
            raise ConfigError(
                f"KV connector {transfer.kv_connector!r} does not go with this model: its prefix "
                "cache hits at one unit, through checkpoints that this connector cannot move. Use "
                "TcpConnector, or leave kv_transfer_config out."
            )

    @property
    def external_source(self) -> str:
        """Where lies what a KV connector loads, as metrics call it."""
        transfer = self.kv_transfer_config
        return "external_unspecified" if transfer is None else transfer.source

    @property
    def has_tiers(self) -> bool:
        """Whether host memory or a disk keep what the KV cache's pool gives up."""
        return self.kv_transfer_config is not None and self.kv_transfer_config.has_tiers

    @property
    def usual_drafts(self) -> int:
        """Drafts that a request usually gets in a step, for which the KV cache has room."""
        config = self.speculative_config
        return config.usual_drafts if config is not None else 0
