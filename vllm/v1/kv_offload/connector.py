"""The connector that keeps prefixes in host memory and on a disk: what the pool would lose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.beside_steps import BesideStepsConnector
from vllm.exceptions import ConfigError, VllmError
from vllm.logger import init_logger
from vllm.v1.kv_offload.identity import find_identity
from vllm.v1.kv_offload.layout import ObjectLayout, make_layout
from vllm.v1.kv_offload.orders import OffloadOrders, OffloadReport
from vllm.v1.kv_offload.settings import OffloadSettings, read_settings
from vllm.v1.kv_offload.store.folder import (
    CacheFolder,
    FolderBusyError,
    FolderError,
    check_place,
    read_marker,
)
from vllm.v1.kv_offload.store.host_store import make_host_store
from vllm.v1.kv_offload.store.keeper import Keeper, StoreKeeper
from vllm.v1.kv_offload.store.latched_disk import LatchedDisk
from vllm.v1.kv_offload.tier import Tier
from vllm.v1.kv_offload.worker import OffloadWorker

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Another server that has the folder writes its hash root within moments.
_MARKER_S = 5.0
_MARKER_POLL_S = 0.01


class OffloadingConnector(BesideStepsConnector):
    """Keeps cached prefixes behind the pool and brings them back.

    Owns: on the scheduler's side the tiers; on the worker's its reads and writes.

    Raises:
        ConfigError: The settings are wrong.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config)
        self._tier: Tier | None = None
        self._worker: OffloadWorker | None = None
        self._wake: Callable[[], None] | None = None

    @classmethod
    def check_before_load(cls, vllm_config: VllmConfig) -> None:
        """Check the settings, and chain prefix hashes to the folder's root.

        A root of its own would make each process name prefixes anew, and nothing would ever be
        found after a restart.

        Raises:
            ConfigError: A setting is wrong, or no folder can be at the place that is named.
        """
        settings = read_settings(vllm_config)
        cache = vllm_config.cache_config
        if settings.base is None:
            return
        try:
            check_place(settings.base)
        except FolderError as error:
            raise ConfigError(f"--prefix-cache-dir (root_dir): {error}") from error
        if cache.prefix_hash_seed is None and "PYTHONHASHSEED" not in os.environ:
            # One for all cores, whatever their number: what one kept another can find.
            cache.prefix_hash_seed = _find_hash_root(settings, settings.base)

    # ---- the scheduler's side ----------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Take the manager, and begin to open the folder."""
        config, settings = manager.kv_cache_config, self._settings
        layout = make_layout(config, self._unit_of(config))
        num_workers = self._vllm_config.parallel_config.tensor_parallel_size
        host = None
        if settings.host_bytes:
            host = make_host_store(layout.usual_bytes(), num_workers, settings.host_bytes)
            if host is None:
                logger.warning(
                    "kv_offloading_size of %d bytes is too small for four entries of up to %d: "
                    "there is no host tier.",
                    settings.host_bytes,
                    max(layout.usual_bytes()),
                )
        keeper = None if settings.root is None else self._make_keeper(config, layout)
        self._tier = Tier(self._vllm_config, settings, manager, layout, host, keeper)
        self.hooks = self._tier

    def _make_keeper(self, config: KVCacheConfig, layout: ObjectLayout) -> Keeper:
        """Begin to open the folder."""
        settings = self._settings
        assert settings.root is not None
        # Weights are digested once for all cores.
        root = settings.base or settings.root
        # One that everybody could guess is no root for a folder.
        is_chosen = "PYTHONHASHSEED" in os.environ
        seed = self._vllm_config.cache_config.prefix_hash_seed
        hash_root = None if is_chosen else seed
        return StoreKeeper(
            lambda: settings.open_folder(hash_root),
            lambda note, stop: find_identity(
                self._vllm_config,
                config,
                layout,
                root,
                note,
                stop,
                read_only=settings.read_only,
            ),
        )

    def begin_record(
        self, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> LatchedDisk | None:
        """Let time pass by a record's clocks, and the disk change only when the record looks.

        Returns:
            What shows the disk; None: there is none.
        """
        self._keeps.use_clock(clock, unix_clock)
        return self._keeps.stores.latch()

    @property
    def _keeps(self) -> Tier:
        assert self._tier is not None, "the scheduler's side was not given the manager"
        return self._tier

    def on_new_request(self, request: Request) -> None:
        """Take note of a request."""
        self._keeps.tracker.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to restore behind the local hit; that runs beside the steps."""
        num_tokens = self._keeps.restores.find_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Order the restore of an admitted request."""
        if num_external_tokens:
            self._keeps.restores.begin(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the step's orders, and begin the next one's."""
        return self._keeps.make_orders(scheduler_output)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        tier = self._keeps
        report = connector_output.kv_connector_worker_meta
        tier.note_step_end()
        if isinstance(report, OffloadReport):
            tier.take_report(report)
        if self._wake is not None and _has_news(connector_output):
            # The next step can do what this one could not.
            self._wake()
        for request_ids, has_failed in (
            (connector_output.finished_recving, False),
            (connector_output.failed_recving, True),
        ):
            for request_id in tuple(request_ids or ()):
                if tier.settle(request_id, has_failed=has_failed):
                    # No request waits for it.
                    request_ids.remove(request_id)  # type: ignore[union-attr]

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Take note of a request's end; nothing keeps its blocks."""
        self._keeps.end(request)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Drain what the tiers gained and lost."""
        return self._keeps.take_events()

    def reset_cache(self) -> bool | None:
        """Forget what the tiers keep."""
        return self._keeps.reset()

    # ---- the worker's side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors."""
        config = self._kv_cache_config
        assert config is not None
        layout = make_layout(config, self._unit_of(config))
        self._worker = OffloadWorker(layout, kv_caches, config.kv_cache_groups, self._rank)

    @property
    def _loader(self) -> OffloadWorker:
        assert self._worker is not None, "the worker's side was not given the KV caches"
        return self._worker

    def _get_orders(self) -> OffloadOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, OffloadOrders)
        return orders

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's restores; no step reads rows that are on their way."""
        self._loader.begin(self._get_orders())

    def wait_for_save(self) -> None:
        """Copy what the step orders to be written: the next step may change it."""
        self._loader.take_rows(self._get_orders())

    def build_connector_worker_meta(self) -> OffloadReport | None:
        """Return what was written, and what was wrong; None: nothing."""
        return self._loader.take_report()

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Take what rouses the engine core: the disk's threads call it."""
        self._wake = wake
        if self._worker is not None:
            self._worker.bind_wake(wake)
        if self._tier is not None and self._tier.stores.keeper is not None:
            self._tier.stores.keeper.bind_wake(wake)
        return True

    def shutdown(self) -> None:
        """Stop all threads and let go of the folder."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._tier is not None:
            self._tier.close()


def _has_news(output: KVConnectorOutput) -> bool:
    """Whether a load or a write has ended."""
    report = output.kv_connector_worker_meta
    has_ended = bool(output.finished_recving or output.failed_recving)
    return has_ended or (isinstance(report, OffloadReport) and report.has_writes)


def _find_hash_root(settings: OffloadSettings, root: Path) -> bytes | None:
    """Return the folder's hash root, made if it is new; None if the folder is of no use."""
    deadline = time.monotonic() + _MARKER_S
    try:
        while (known := read_marker(root)) is None:
            try:
                folder = CacheFolder(root, settings.find_max_bytes(), read_only=settings.read_only)
            except FolderBusyError:
                # Who has the lock writes the root first of all: another server that starts now.
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_MARKER_POLL_S)
            else:
                folder.close()
                return folder.hash_root
    except (VllmError, OSError):
        # The keeper tells it, once.
        return None
    return known
