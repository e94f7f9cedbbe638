"""What a KV connector must do, on the scheduler's side and on the worker's.

One step, seen by a connector:

    scheduler   get_num_new_matched_tokens -> update_state_after_alloc -> build_connector_meta
    worker      bind_connector_metadata -> start_load_kv -> (per layer: wait_for_layer_load,
                save_kv_layer) -> wait_for_save -> get_finished
    scheduler   update_connector_output;  request_finished when a request ends

The two sides are two objects of the same class, told apart by their role; what passes between
them is the metadata of the step and the worker's KVConnectorOutput.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.hooks import ConnectorHooks

if TYPE_CHECKING:
    import torch

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVConnectorRole(Enum):
    """Which side of the connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - a marker: each connector defines its fields
    """What the scheduler's side tells the worker's for one step."""


class KVConnectorWorkerMetadata(ABC):
    """What the worker's side tells the scheduler's after a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge the messages of two workers."""


class SupportsHMA(ABC):
    """Marks a connector that handles models with several KV cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``, with the blocks of every group."""


def supports_hma(connector: Any) -> bool:
    """Whether a connector, or its class, handles several KV cache groups."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


class SchedulerSide(ABC):
    """What the scheduler asks of a connector.

    Attributes:
        hooks: What it asks besides, of connectors of this engine.
    """

    hooks: ConnectorHooks = ConnectorHooks()

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask how many tokens beyond the local hit can be loaded.

        Args:
            request: The request.
            num_computed_tokens: Tokens found in the engine's own cache.

        Returns:
            The tokens, None if that is not known yet (ask again in a later step); and whether
            loading runs beside the steps, so that the request waits for it.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Take note of the blocks into which ``num_external_tokens`` are to be loaded."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's message to the workers, and begin the next one's."""

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take the scheduler's block pool, for connectors that hold blocks themselves."""
        return

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take the manager, for connectors that move prefixes with all that resuming needs.

        From then on ``hooks`` are asked.
        """
        return

    def on_new_request(self, request: Request) -> None:
        """Take note of a request that enters the queue.

        Raises:
            UserInputError: What it says of its transfer is wrong.
        """
        return

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers reported."""
        return

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note of a request's end, before its blocks are freed.

        Returns:
            Whether the connector keeps the blocks until the workers report the request in
            ``finished_sending``; and parameters for the client.
        """
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Drain the connector's own KV events."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget cached prefixes; None if there is nothing to forget, False if that failed."""
        return None


class WorkerSide(ABC):
    """What a worker asks of a connector; one step's message is bound at a time.

    Attributes:
        acts_by_layer: Whether a step's layers are waited for and saved one by one.
    """

    acts_by_layer: bool = True
    _connector_metadata: KVConnectorMetadata | None = None
    _rank: int = 0

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's message."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Forget the step's message."""
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way."""
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        assert self._connector_metadata is not None, "No step is under way."
        return self._connector_metadata

    def bind_rank(self, rank: int) -> None:
        """Take the worker's index among those that share its model; comes before the caches."""
        self._rank = rank

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors by layer name."""
        return

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., Any]) -> None:
        """Take the platform's copy between device and host blocks."""
        return

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load the step's blocks."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until a layer's blocks are loaded."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to save a layer's blocks."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Block until the step's blocks may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks were (sent, received) since the last call."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded in this step."""
        return set()

    def get_failed_loads(self) -> set[str]:
        """Return the requests whose loads failed as a whole since the last call."""
        return set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the worker's message to the scheduler's side."""
        return None

    def get_kv_connector_stats(self) -> Any:
        """Return the connector's statistics since the last call; None if it keeps none."""
        return None


class KVConnectorBase_V1(SchedulerSide, WorkerSide):
    """Base class of KV connectors.

    Args:
        vllm_config: All configuration; ``kv_transfer_config`` is set.
        role: Which side this object is.
        kv_cache_config: Groups and size of the KV cache.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self._vllm_config = vllm_config
        self._kv_transfer_config: KVTransferConfig = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @classmethod
    def check_before_load(cls, vllm_config: VllmConfig) -> None:
        """Refuse what cannot work, in the front end and in the engine core before weights load.

        Raises:
            ConfigError: A setting is wrong, or an address is taken.
        """
        return

    @property
    def role(self) -> KVConnectorRole:
        """Which side this object is."""
        return self._role

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Take what rouses a waiting engine core; any thread may call it.

        Returns:
            Whether this side calls it whenever there is something to report or to go on with; else
            the core looks again every few milliseconds.
        """
        return False

    def get_finished_count(self) -> int | None:
        """Return how many workers report a finished transfer; None: all."""
        return None

    def shutdown(self) -> None:
        """Release what the connector holds."""
        return
