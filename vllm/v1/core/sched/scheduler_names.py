"""What code written against the interface reads, writes and leaves out on a scheduler."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.encoder_inputs import EncoderPlanner
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.requests import Requests
from vllm.v1.request import Request

T = TypeVar("T")


class PartOf(Generic[T]):
    """An attribute of the scheduler that reads and writes one of a part's.

    The part is the one owner; the old name stays usable for code written against the interface.

    Args:
        part: The scheduler's attribute that is the part.
        name: The part's attribute.
    """

    def __init__(self, part: str, name: str) -> None:
        self._part = part
        self._name = name

    def __get__(self, scheduler: Any, owner: type | None = None) -> T:
        if scheduler is None:
            return cast("T", self)
        return cast("T", getattr(getattr(scheduler, self._part), self._name))

    def __set__(self, scheduler: Any, value: T) -> None:
        setattr(getattr(scheduler, self._part), self._name, value)


class SchedulerNames:
    """The interface's names on a scheduler whose parts own what is behind them.

    A scheduler may also be made without ``__init__``, given those names, and asked to update a
    decode step: the parts that were not made then are made here, empty.
    """

    requests = PartOf[dict[str, Request]]("_requests", "by_id")
    waiting = PartOf[RequestQueue]("_requests", "waiting")
    skipped_waiting = PartOf[RequestQueue]("_requests", "skipped_waiting")
    running = PartOf[list[Request]]("_requests", "running")
    finished_req_ids = PartOf[set[str]]("_requests", "finished_ids")
    finished_req_ids_dict = PartOf[dict[int, set[str]] | None](
        "_requests", "finished_ids_by_client"
    )
    finished_recving_kv_req_ids = PartOf[set[str]]("_requests", "loaded_ids")
    _inflight_prefills = PartOf[set[Request]]("_requests", "prefilling")
    encoder_cache_manager = PartOf[Any]("_encoder", "cache")
    ec_connector = PartOf[Any]("_encoder", "ec_connector")
    is_encoder_decoder = PartOf[bool]("_encoder", "is_encoder_decoder")
    max_num_encoder_input_tokens = PartOf[int]("_encoder", "compute_budget")

    log_stats: bool = False

    @cached_property
    def _requests(self) -> Requests:
        return Requests()

    @cached_property
    def _encoder(self) -> EncoderPlanner:
        return EncoderPlanner(EncoderCacheManager(0))
