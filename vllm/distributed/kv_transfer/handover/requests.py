"""The scheduler's side of a handover: which request takes what, and what is held for whom.

takes    waiting --(blocks allocated)--> loading --(worker reports)--> settled
            `--(all of it is here, or it ended)--------------------------^
         a lease whose last request is settled is given back to its holder

gives    a request that asked for it ends --> its prefix is held under a lease, until the
         worker says that nobody reads it any more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.distributed.kv_transfer.handover.orders import HandoverOrders, LoadOrder
from vllm.distributed.kv_transfer.handover.params import (
    NOTHING_HELD,
    RemotePrefix,
    TransferRequest,
    digest_prompt,
    parse_params,
)
from vllm.exceptions import UserInputError
from vllm.logger import init_logger
from vllm.v1.core.pool.exports import PrefixBlocks
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

logger = init_logger(__name__)

_FIELD = "kv_transfer_params"
# Of a request's id in the name of its lease, for people who read logs.
_MAX_ID_CHARS = 128
# A prompt that was computed, whether or not its one token happened to end the answer.
_COMPUTED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class _Stage(Enum):
    WAITING = auto()
    LOADING = auto()


class Taking:
    """The requests that take a prefix from another engine.

    Owns: their stages, and who still needs which lease.

    Args:
        manager: Gives their blocks.
        unit: Tokens on whose multiples a prefix ends.
    """

    def __init__(self, manager: KVCacheManager, unit: int) -> None:
        self._manager = manager
        self._unit = unit
        self._stages: dict[str, _Stage] = {}
        self._prefixes: dict[str, RemotePrefix] = {}
        # By lease the requests that may still load it.
        self._users: dict[tuple[str, str], set[str]] = {}

    def __len__(self) -> int:
        return len(self._stages)

    def add(self, request: Request, prefix: RemotePrefix) -> None:
        """Take note of a request.

        Raises:
            UserInputError: The prefix is not one of its prompt.
        """
        num_tokens = prefix.num_tokens
        if num_tokens % self._unit or num_tokens >= request.num_prompt_tokens:
            raise UserInputError(
                f"{_FIELD}.remote_num_tokens={num_tokens} must be a multiple of {self._unit} "
                f"below the prompt's {request.num_prompt_tokens} tokens: send the prompt that the "
                "prefilling server answered.",
                _FIELD,
            )
        token_ids = request.all_token_ids[:num_tokens]
        if digest_prompt(token_ids, request.cache_salt, request.mm_features) != prefix.digest:
            raise UserInputError(
                f"{_FIELD} belong to another prompt, or to another cache_salt: send the request "
                "that the prefilling server answered.",
                _FIELD,
            )
        self._stages[request.request_id] = _Stage.WAITING
        self._prefixes[request.request_id] = prefix
        self._users.setdefault((prefix.instance, prefix.lease), set()).add(request.request_id)

    def find_tokens(self, request: Request, num_local: int) -> int | None:
        """Return the tokens beyond the local hit to load; None: another request loads them."""
        if self._stages.get(request.request_id) is not _Stage.WAITING:
            return 0
        prefix = self._prefixes[request.request_id]
        if request.skip_reading_prefix_cache or prefix.num_tokens <= num_local:
            return 0
        if self._manager.enable_caching:
            users = self._users[prefix.instance, prefix.lease]
            if any(self._stages[user] is _Stage.LOADING for user in users):
                return None
        return prefix.num_tokens - num_local

    def begin(self, request: Request, num_external: int, orders: HandoverOrders) -> None:
        """Take note of an admission, and order its load if there is one."""
        request_id = request.request_id
        if self._stages.get(request_id) is not _Stage.WAITING:
            return
        if not num_external:
            self.settle(request_id, orders)
            return
        prefix = self._prefixes[request_id]
        self._stages[request_id] = _Stage.LOADING
        blocks = self._manager.coordinator.find_import(request, prefix.num_tokens, num_external)
        orders.loads.append(LoadOrder(request_id, prefix, blocks))

    def end(self, request: Request, orders: HandoverOrders) -> None:
        """Take note that a request ended, perhaps before its load did."""
        request_id = request.request_id
        if self._stages.get(request_id) is _Stage.LOADING:
            # Settled when the worker says that it writes no more.
            orders.cancelled.append(request_id)
        else:
            self.settle(request_id, orders)

    def give_up(self, request_ids: Iterable[str], orders: HandoverOrders) -> None:
        """Stop loads of which a part failed at one of several workers."""
        for request_id in request_ids:
            if self._stages.get(request_id) is _Stage.LOADING:
                orders.cancelled.append(request_id)

    def settle(self, request_id: str, orders: HandoverOrders) -> None:
        """Take note that a request needs its prefix no more; the last one gives it back."""
        if self._stages.pop(request_id, None) is None:
            return
        prefix = self._prefixes.pop(request_id)
        users = self._users[prefix.instance, prefix.lease]
        users.discard(request_id)
        if not users:
            del self._users[prefix.instance, prefix.lease]
            orders.returned.append(prefix)


class Giving:
    """The prefixes that are held for other engines.

    Owns: the leases' names, until all workers let go of them.

    Args:
        manager: Holds their blocks.
        num_workers: How many workers read them.
        make_prefix: Says who holds a prefix, given all else.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        num_workers: int,
        make_prefix: Callable[[str, PrefixBlocks], RemotePrefix],
    ) -> None:
        self._manager = manager
        self._num_workers = num_workers
        self._make_prefix = make_prefix
        self._asked: set[str] = set()
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, request: Request) -> None:
        """Take note of a request whose prefix shall be held."""
        self._asked.add(request.request_id)

    def end(self, request: Request, orders: HandoverOrders) -> dict[str, Any] | None:
        """Hold the prefix of a request that ended; returns what its client must know."""
        if request.request_id not in self._asked:
            return None
        self._asked.discard(request.request_id)
        if request.status not in _COMPUTED:
            return None
        found = self.hold(request, orders)
        if found is None:
            return dict(NOTHING_HELD)
        prefix, blocks = found
        token_ids = request.all_token_ids[: blocks.num_tokens]
        digest = digest_prompt(token_ids, request.cache_salt, request.mm_features)
        return replace(prefix, digest=digest).to_params(blocks.block_ids)

    def hold(
        self, request: Request, orders: HandoverOrders
    ) -> tuple[RemotePrefix, PrefixBlocks] | None:
        """Hold what is cached of a prompt; returns it, without a digest. None: nothing is."""
        # Whoever knows the name may read the rows, or have them let go: nobody shall guess it.
        lease = f"{request.request_id[:_MAX_ID_CHARS]}-{uuid4().hex}"
        blocks = self._manager.export_prefix(lease, request)
        if blocks is None:
            return None
        self._held[lease] = 0
        orders.offers[lease] = blocks
        return self._make_prefix(lease, blocks), blocks

    def withdraw(self, leases: Iterable[str], orders: HandoverOrders) -> None:
        """Have prefixes freed that nobody will load; unknown ones are ignored."""
        orders.withdrawn += [lease for lease in leases if lease in self._held]

    def release(self, ended: Iterable[tuple[str, int]]) -> None:
        """Free the prefixes that no worker reads any more.

        Args:
            ended: Leases, and how many workers let go of each since the last time.
        """
        for lease, count in ended:
            if lease not in self._held:
                continue
            self._held[lease] += count
            if self._held[lease] >= self._num_workers:
                del self._held[lease]
                self._manager.release_export(lease)


def read_transfer_request(request: Request, *, can_give: bool, can_take: bool) -> TransferRequest:
    """Return what a request asks for.

    Raises:
        UserInputError: It is malformed, or not what this server does.
    """
    asked = parse_params(request.kv_transfer_params)
    if asked.gives and not can_give:
        raise UserInputError(
            f"{_FIELD}.do_remote_decode asks this server to hold a prompt's KV, but it only takes "
            "KV (kv_role kv_consumer): send it to a kv_producer.",
            _FIELD,
        )
    if asked.takes is not None and not can_take:
        raise UserInputError(
            f"{_FIELD}.do_remote_prefill asks this server to load KV, but it only gives KV "
            "(kv_role kv_producer): send it to a kv_consumer.",
            _FIELD,
        )
    return asked
