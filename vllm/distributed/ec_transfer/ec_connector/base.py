"""What an encoder-cache connector must do on the scheduler's side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class ECConnectorRole(Enum):
    """Which side of the connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata(ABC):  # noqa: B024 - a marker: each connector defines its fields
    """What the scheduler's side tells the worker's for one step."""


class ECConnectorBase(ABC):
    """Base class of encoder-cache connectors.

    Args:
        vllm_config: All configuration; ``ec_transfer_config`` is set.
        role: Which side this object is.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        config = vllm_config.ec_transfer_config
        assert config is not None
        self._vllm_config = vllm_config
        self._ec_transfer_config = config
        self._role = role
        self._is_producer = config.is_ec_producer
        self._is_consumer = config.is_ec_consumer

    @property
    def role(self) -> ECConnectorRole:
        """Which side this object is."""
        return self._role

    @property
    def is_producer(self) -> bool:
        """Whether this engine gives encoder outputs away."""
        return self._is_producer

    @property
    def is_consumer(self) -> bool:
        """Whether this engine takes encoder outputs."""
        return self._is_consumer

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool:
        """Whether an item's output can be loaded."""

    @abstractmethod
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Take note of an item that was given room in the encoder cache."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """Return the step's message to the workers, and begin the next one's."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now; False while its items are on their way."""
        return True

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Take note of a request's end."""
        return False, None
