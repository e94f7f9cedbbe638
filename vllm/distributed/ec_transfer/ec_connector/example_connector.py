"""A connector that finds encoder outputs as files in a shared folder (scheduler's side)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_FILE_NAME = "encoder_cache.safetensors"


class MMMeta(NamedTuple):
    """An item to load: its identifier and how many embeddings it has."""

    mm_hash: str
    num_token: int


@dataclass
class ECExampleConnectorMetadata(ECConnectorMetadata):
    """The items that workers load in one step."""

    mm_datas: list[MMMeta] = field(default_factory=list)


class ECExampleConnector(ECConnectorBase):
    """Encoder outputs under ``shared_storage_path/<identifier>/encoder_cache.safetensors``.

    Owns: the loads of the step that is being scheduled.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._loads: list[MMMeta] = []
        self._storage_path = Path(
            self._ec_transfer_config.get_from_extra_config("shared_storage_path", "/tmp")
        )

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item's file exists."""
        return (self._storage_path / identifier / _FILE_NAME).exists()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Load the item in this step, if it is there and this engine takes outputs."""
        identifier = request.mm_features[index].identifier
        if self.is_consumer and self.has_cache_item(identifier):
            self._loads.append(MMMeta(identifier, request.get_num_encoder_embeds(index)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """Return the step's loads, and begin the next step's."""
        loads, self._loads = self._loads, []
        return ECExampleConnectorMetadata(loads)
