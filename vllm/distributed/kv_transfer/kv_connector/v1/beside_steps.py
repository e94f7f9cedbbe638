"""The base of connectors that move whole prefixes while steps run."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_interface import KVCacheConfig


class PrefixLoader(Protocol):
    """A worker's loads, as a step sees them."""

    def collect(self) -> set[str]:
        """Drain the requests whose prefixes came whole."""
        ...

    def take_failed(self) -> set[str]:
        """Drain the requests whose prefixes did not come."""
        ...


class BesideStepsConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves prefixes of hybrid caches whole, while steps run: no layer of a step waits for it."""

    moves_checkpoints = True
    acts_by_layer = False

    @property
    @abstractmethod
    def _loader(self) -> PrefixLoader:
        """The worker's loads."""

    def _unit_of(self, config: KVCacheConfig) -> int:
        """Return the tokens on whose multiples a prefix ends."""
        return config.hit_unit or self._vllm_config.cache_config.block_size

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no step reads rows that are on their way."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: rows are taken when all layers have run, or out of the pool itself."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose prefixes came."""
        return None, self._loader.collect()

    def get_failed_loads(self) -> set[str]:
        """Return the requests whose prefixes did not come."""
        return self._loader.take_failed()
