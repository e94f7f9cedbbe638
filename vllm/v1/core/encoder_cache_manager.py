"""Which encoder outputs are kept, and whether another one fits.

Sizes count encoder embeddings. An output that no request uses any more stays reusable until its
room is needed: it is *freeable* then, in the order in which it became so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig
    from vllm.v1.request import Request


# Uses an output while it is made; no request has such an id.
_MAKER = ""


def find_identifier(request: Request, input_id: int) -> str:
    """Return under which an item's output is kept where all requests share outputs."""
    return request.mm_features[input_id].identifier


class EncoderCacheManager:
    """Encoder outputs shared between requests by identifier, the least recently used going first.

    Owns: who uses which output, and the room that is left.

    Attributes:
        cached: Identifier to the ids of the requests that use it (none: freeable).
        request_cached_ids: Request id to the indices of its items that it holds.
        freeable: Identifier to embeddings, first to be evicted first.
        freed: Identifiers evicted since the last drain.
        num_free_slots: Embeddings that fit at once.
        num_freeable_slots: Embeddings that fit after evicting everything freeable.

    Args:
        cache_size: Embeddings the cache holds.
        find_key: Under which an item's output is kept; requests with unequal keys share none.
    """

    def __init__(
        self, cache_size: int, find_key: Callable[[Request, int], str] = find_identifier
    ) -> None:
        self._find_key = find_key
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self.cached: dict[str, set[str]] = {}
        self.request_cached_ids: dict[str, set[int]] = {}
        self.freeable: OrderedDict[str, int] = OrderedDict()
        self.freed: list[str] = []

    def reset(self) -> None:
        """Forget everything: the worker's cache was cleared."""
        self.cached.clear()
        self.request_cached_ids.clear()
        self.freeable.clear()
        self.freed.clear()
        self.num_free_slots = self.cache_size
        self.num_freeable_slots = self.cache_size

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether an item's output is cached; if so the request now uses it."""
        identifier = self._find_key(request, input_id)
        users = self.cached.get(identifier)
        if users is None:
            return False
        if not users:
            self.num_freeable_slots -= self.freeable.pop(identifier)
        self._use(request, input_id)
        return True

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether an item can be computed and stored in this step.

        Args:
            request: The request.
            input_id: Index of the item.
            encoder_compute_budget: Embeddings that may still be computed.
            num_embeds_to_schedule: Embeddings already promised room in this step.

        Mutates:
            Evicts the oldest freeable outputs when only that makes room.
        """
        num_embeds = request.get_num_encoder_embeds(input_id)
        if num_embeds > encoder_compute_budget:
            return False
        needed = num_embeds + num_embeds_to_schedule
        if needed > self.num_freeable_slots:
            return False
        while needed > self.num_free_slots:
            identifier, num_freed = self.freeable.popitem(last=False)
            del self.cached[identifier]
            self.freed.append(identifier)
            self.num_free_slots += num_freed
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """Give an item its room; ``can_allocate`` said yes."""
        identifier = self._find_key(request, input_id)
        num_embeds = request.get_num_encoder_embeds(input_id)
        assert identifier not in self.cached, f"Encoder output {identifier} is cached already."
        assert num_embeds <= self.num_free_slots, (
            f"Encoder output {identifier} needs {num_embeds} slots, {self.num_free_slots} are free."
        )
        self.cached[identifier] = set()
        self._use(request, input_id)
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds

    def reserve(self, request: Request, input_id: int) -> str:
        """Give an item room while it is made beside the steps; ``can_allocate`` said yes.

        Returns:
            Its key, for ``settle``; until then nobody evicts it.
        """
        key = self._find_key(request, input_id)
        num_embeds = request.get_num_encoder_embeds(input_id)
        assert key not in self.cached, f"Encoder output {key} is cached already."
        self.cached[key] = {_MAKER}
        self.num_free_slots -= num_embeds
        self.num_freeable_slots -= num_embeds
        return key

    def settle(self, key: str, num_embeds: int, *, is_made: bool) -> None:
        """An item was made, so that requests may use it; or it was given up."""
        users = self.cached[key]
        users.discard(_MAKER)
        if not is_made:
            del self.cached[key]
            self.num_free_slots += num_embeds
            # Another worker than the one that speaks may have made it.
            self.freed.append(key)
        elif not users:
            self.freeable[key] = num_embeds
        self.num_freeable_slots += num_embeds

    def _use(self, request: Request, input_id: int) -> None:
        self.cached[self._find_key(request, input_id)].add(request.request_id)
        self.request_cached_ids.setdefault(request.request_id, set()).add(input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Return the indices of the items whose outputs the request holds."""
        return set(self.request_cached_ids.get(request.request_id, ()))

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The request no longer needs an item's output; unknown items are ignored."""
        held = self.request_cached_ids.get(request.request_id)
        if held is not None:
            held.discard(input_id)
            if not held:
                del self.request_cached_ids[request.request_id]
        identifier = self._find_key(request, input_id)
        users = self.cached.get(identifier)
        if not users:
            return
        # The same item may stand twice in a prompt: its last place frees it.
        if held and any(self._find_key(request, i) == identifier for i in held):
            return
        users.discard(request.request_id)
        if not users:
            num_embeds = request.get_num_encoder_embeds(input_id)
            self.freeable[identifier] = num_embeds
            self.num_freeable_slots += num_embeds

    def free(self, request: Request) -> None:
        """The request no longer needs any output."""
        for input_id in self.get_cached_input_ids(request):
            self.free_encoder_input(request, input_id)

    def forget(self, request: Request, input_ids: Iterable[int]) -> None:
        """Items that a request was to compute are not: it left the step, and let go of all.

        Mutates:
            What others use meanwhile stays: a worker makes it when they read it.
        """
        for input_id in input_ids:
            key = self._find_key(request, input_id)
            if key in self.freeable:
                self.num_free_slots += self.freeable.pop(key)
                del self.cached[key]

    def find_faults(self) -> list[str]:
        """Return in words what contradicts itself (I10)."""
        faults = []
        if not 0 <= self.num_free_slots <= self.num_freeable_slots <= self.cache_size:
            faults.append(f"{self.num_free_slots} free of {self.cache_size}")
        if {key for key, users in self.cached.items() if not users} != set(self.freeable):
            faults.append("an output in use may be evicted, or one that nobody uses may not")
        return faults

    def get_freed_mm_hashes(self) -> list[str]:
        """Drain the identifiers that workers must drop."""
        freed, self.freed = self.freed, []
        return freed


class EncoderDecoderCacheManager:
    """Encoder outputs of encoder-decoder models: each serves its own request, once.

    The output is read by cross attention in the step that computes it and kept in its KV pages
    afterwards, so it is dropped one step later and never shared.

    Owns: the room that is left, and what workers must drop.

    Attributes:
        allocated: Identifiers computed since the last drain.
        to_free: Identifiers to report at the next one.
        num_free_slots: Embeddings that fit.

    Args:
        cache_size: Embeddings the cache holds.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.allocated: list[str] = []
        self.to_free: list[str] = []

    def reset(self) -> None:
        """Forget everything."""
        self.num_free_slots = self.cache_size
        self.allocated.clear()
        self.to_free.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether an item's output is cached: never."""
        return False

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether an item can be computed and stored in this step (see EncoderCacheManager)."""
        num_embeds = request.get_num_encoder_embeds(input_id)
        if num_embeds > encoder_compute_budget:
            return False
        return num_embeds + num_embeds_to_schedule <= self.num_free_slots

    def allocate(self, request: Request, input_id: int) -> None:
        """Give an item its room."""
        self.num_free_slots -= request.get_num_encoder_embeds(input_id)
        self.allocated.append(request.mm_features[input_id].identifier)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Return the indices of all items: their room is held until the request frees it."""
        return set(range(len(request.mm_features)))

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """Give back an item's room."""
        self.num_free_slots += request.get_num_encoder_embeds(input_id)

    def free(self, request: Request) -> None:
        """Give back the room of all items."""
        for input_id in self.get_cached_input_ids(request):
            self.free_encoder_input(request, input_id)

    def forget(self, request: Request, input_ids: Iterable[int]) -> None:
        """Do nothing: outputs are not kept for others."""

    def get_freed_mm_hashes(self) -> list[str]:
        """Drain the identifiers that workers must drop: those computed a step ago."""
        freed = self.to_free
        self.to_free, self.allocated = self.allocated, []
        return freed


def compute_mm_encoder_budget(
    scheduler_config: SchedulerConfig, mm_max_toks_per_item: Mapping[str, int]
) -> tuple[int, int]:
    """Return the encoder's compute budget per step and its cache size, in embeddings.

    Both hold at least the largest single item, else that item could never be scheduled.

    Args:
        scheduler_config: The configured budgets.
        mm_max_toks_per_item: Most embeddings of one item, by modality; empty for text models.

    Raises:
        ConfigError: (a ValueError) Items may not be chunked and one does not fit into a step.
    """
    if not mm_max_toks_per_item:
        return 0, 0
    modality, largest = max(mm_max_toks_per_item.items(), key=lambda item: item[1])
    max_batched = scheduler_config.max_num_batched_tokens
    if scheduler_config.disable_chunked_mm_input and largest > max_batched:
        raise ConfigError(
            f"A {modality} item takes up to {largest} tokens, more than max_num_batched_tokens="
            f"{max_batched}, and disable_chunked_mm_input forbids to split it: raise "
            f"max_num_batched_tokens to at least {largest}."
        )
    return (
        max(scheduler_config.max_num_encoder_input_tokens, largest),
        max(scheduler_config.encoder_cache_size, largest),
    )
