"""What requests hold beside their place in a queue, and how they let go of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.requests import Requests
from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Holdings:
    """The requests with the caches in which they hold something.

    Made anew for each step, of what the scheduler has then: outsiders exchange parts of it.

    Attributes:
        requests: All requests.
        manager: Holds their KV blocks.
        encoder: Holds their encoder outputs.
        connector: The KV connector's scheduler side, if any.
    """

    requests: Requests
    manager: KVCacheManager
    encoder: EncoderPlanner
    connector: Any

    def preempt(self, request: Request, timestamp: float) -> None:
        """Take everything from a request that the caller removed from ``running``."""
        self.manager.free(request)
        self.encoder.cache.free(request)
        self.requests.preempt(request, timestamp)

    def end(self, request: Request, *, delay_free_blocks: bool = False) -> dict[str, Any] | None:
        """Let an ended request, in no queue any more, go of everything.

        Args:
            request: The request.
            delay_free_blocks: Whether a transfer into its blocks is under way.

        Returns:
            What the connector wants the client to know.
        """
        assert request.is_finished()
        keeps_blocks, kv_transfer_params = self._tell_connector(request)
        self.encoder.cache.free(request)
        self.requests.note_end(request)
        if not keeps_blocks and not delay_free_blocks:
            self.free_blocks(request)
        return kv_transfer_params

    def _tell_connector(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the connector keeps the request's blocks, and its message."""
        if self.connector is None:
            return False, None
        block_ids = self.manager.get_block_ids(request.request_id)
        if isinstance(self.connector, SupportsHMA):
            return self.connector.request_finished_all_groups(request, block_ids)
        keeps, params = self.connector.request_finished(request, block_ids[0] if block_ids else [])
        return bool(keeps), params

    def free_blocks(self, request: Request) -> None:
        """Free the blocks of an ended request, and forget it."""
        self.manager.free(request)
        self.requests.forget(request)

    def refuse(self, request: Request, reason: str) -> None:
        """End a request, in no queue any more, with an error its client is told."""
        logger.warning("Request %s is refused: %s", request.request_id, reason)
        request.fail(reason)
        self.end(request)
        self.requests.refused.append(request)
