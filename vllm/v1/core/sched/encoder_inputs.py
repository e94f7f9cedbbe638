"""Which multimodal items a step must encode, and how far that lets the step go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.exceptions import UserInputError
from vllm.v1.core.sched.tower_orders import TowerOrders

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class EncoderDecision:
    """The encoder side of one request in one step.

    Attributes:
        num_new_tokens: Tokens the request may compute, given what can be encoded.
        budget: Encoder embeddings left for others.
        compute: Items to encode.
        external: Items whose outputs another engine provides.
        waits: Whether more tokens wait for what is made beside the steps.
    """

    num_new_tokens: int
    budget: int
    compute: list[int] = field(default_factory=list)
    external: list[int] = field(default_factory=list)
    waits: bool = False


class ItemCounts:
    """Counts each item of a request once, however often a step is planned, and encoders' time.

    Owns: the counts since the last drain, and what was counted of requests that are alive.
    """

    def __init__(self) -> None:
        self._counted: dict[str, set[str]] = {}
        self._queries = self._hits = 0
        self._seconds = 0.0

    def note(self, request_id: str, key: str, *, is_hit: bool) -> None:
        """An output was looked up."""
        counted = self._counted.setdefault(request_id, set())
        if key not in counted:
            counted.add(key)
            self._queries += 1
            self._hits += is_hit

    def note_seconds(self, seconds: float) -> None:
        """Encoders have run so long."""
        self._seconds += seconds

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._counted.pop(request_id, None)

    def take(self) -> tuple[int, int, float]:
        """Drain how many were looked up, how many of these were there, and encoders' seconds."""
        counts = self._queries, self._hits, self._seconds
        self._queries = self._hits = 0
        self._seconds = 0.0
        return counts


@dataclass(slots=True)
class EncoderPlanner:
    """Chooses encoder inputs. Not frozen: outsiders exchange its parts through the scheduler.

    Attributes:
        cache: The encoder cache manager.
        ec_connector: Provider of encoder outputs, if any.
        is_encoder_decoder: Whether items are read by cross attention, all in the first step.
        disable_chunked_mm_input: Whether an item must be computed in one step, or what is left of
            it behind a hit.
        shift: Tokens by which the drafter reads ahead (1 with EAGLE).
        compute_budget: Embeddings that one step may compute.
        counts: How many items were looked up and found.
        orders: What is made beside the steps; None: steps make everything.
        longest: Those of the largest item that is served; 0: what there is room for.
    """

    cache: Any
    ec_connector: Any = None
    is_encoder_decoder: bool = False
    disable_chunked_mm_input: bool = False
    shift: int = 0
    compute_budget: int = 0
    longest: int = 0
    counts: ItemCounts = field(default_factory=ItemCounts)
    orders: TowerOrders | None = None

    def decide(
        self,
        request: Request,
        start: int,
        num_new_tokens: int,
        budget: int,
        room: int | None = None,
    ) -> EncoderDecision:
        """Choose the items that tokens ``[start, start + num_new_tokens)`` need.

        Args:
            request: The request.
            start: Where the step begins, a hit included.
            num_new_tokens: Tokens that it wants.
            budget: Encoder embeddings that the step may still compute.
            room: Tokens that it may have to end an item; None: no more.

        Mutates:
            Marks locally cached items as used by the request, may evict freeable outputs, and has
            items made beside the steps, behind which the request waits.
        """
        decision = EncoderDecision(num_new_tokens, budget)
        if num_new_tokens == 0 or not request.has_encoder_inputs:
            return decision
        decision.num_new_tokens = self.fit_items(request, start, num_new_tokens, room)
        if decision.num_new_tokens == 0:
            return decision
        chosen: set[str] = set()
        num_embeds_to_schedule = 0
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset >= start + decision.num_new_tokens + self.shift:
                break
            if self._is_past(start, position.offset + position.length):
                continue
            key = request.encoder_key(index)
            if self.orders is not None and self.orders.is_open(key):
                self._wait(request, key, start, position.offset, decision)
                break
            if key in chosen:
                continue
            if self.cache.check_and_update_cache(request, index):
                self.counts.note(request.request_id, key, is_hit=True)
                continue
            limit = self._limit(request, index, start, decision, num_embeds_to_schedule)
            if limit is not None:
                decision.num_new_tokens = limit
                # Room comes when what is being made is used.
                decision.waits = bool(self.orders)
                break
            if not self._needs_embeds(position, start, decision.num_new_tokens):
                continue
            self.counts.note(request.request_id, key, is_hit=False)
            num_embeds = request.get_num_encoder_embeds(index)
            num_embeds_to_schedule += num_embeds
            chosen.add(key)
            if self.ec_connector is not None and self.ec_connector.has_cache_item(
                feature.identifier
            ):
                decision.external.append(index)
            elif self.orders is not None:
                key = self.cache.reserve(request, index)
                self.orders.place(key, num_embeds, feature.data)
                self._wait(request, key, start, position.offset, decision)
                break
            else:
                decision.budget -= num_embeds
                decision.compute.append(index)
        return decision

    def _wait(
        self, request: Request, key: str, start: int, offset: int, decision: EncoderDecision
    ) -> None:
        """Let a request have the tokens before an item that is being made."""
        assert self.orders is not None
        self.orders.join(key, request.request_id)
        decision.num_new_tokens = max(0, offset - (start + self.shift))
        decision.waits = True

    def note_made(
        self, made: Iterable[tuple[str, bool]], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Take what workers say of orders.

        Args:
            made: By key, whether they were made or given up.
            seconds: By key, how long encoders ran.

        Returns:
            Of each request that waited, the seconds.
        """
        self.counts.note_seconds(sum(seconds.values()))
        waited: dict[str, float] = {}
        if self.orders is None:
            return waited
        for key, is_made in made:
            for request_id in self.orders.waiting_for(key):
                waited[request_id] = waited.get(request_id, 0.0) + seconds.get(key, 0.0)
            self.cache.settle(key, self.orders.settle(key), is_made=is_made)
        return waited

    def leave(self, request: Request) -> None:
        """A request ended: nothing is made for it any more."""
        if not request.has_encoder_inputs:
            return
        self.counts.forget(request.request_id)
        if self.orders is not None:
            self.orders.leave(request.request_id)

    def fit_items(
        self, request: Request, start: int, num_new_tokens: int, room: int | None = None
    ) -> int:
        """Return how many tokens a step takes so that it ends inside no item (I9).

            item                  |.......|
            step ends inside   [-----)             -> before it
                                     [---)         -> behind it, where the step has room
                                                   -> else nothing: a later step has more

        Args:
            request: The request.
            start: Where the step begins.
            num_new_tokens: Tokens that it wants.
            room: Tokens that it may have to end an item; None: no more.
        """
        if not self.disable_chunked_mm_input or self.is_encoder_decoder:
            return num_new_tokens
        end = start + num_new_tokens
        for feature in request.mm_features:
            first = feature.mm_position.offset
            item_end = first + feature.mm_position.length
            if not first < end < item_end:
                continue
            if start < first:
                return first - start
            most = num_new_tokens if room is None else room
            return item_end - start if item_end - start <= most else 0
        return num_new_tokens

    def check(self, request: Request) -> None:
        """Refuse a request with an item for which there is never room.

        Raises:
            UserInputError: There is none.
        """
        for index in range(len(request.mm_features)):
            count, room = request.get_num_encoder_embeds(index), self.cache.cache_size
            most = min(room, self.longest or room)
            if count > most:
                why = ""
                if most == self.longest:
                    why = (
                        ", as its tokens see all of each other, and the cache keeps no row farther "
                        "back than the model's window"
                    )
                raise UserInputError(
                    f"picture {index + 1} of the prompt takes {count} tokens, but the largest "
                    f"that is served has {most}{why}: ask for a smaller one (detail, or "
                    "mm_processor_kwargs), or leave it out."
                )

    def let_go(self, request: Request) -> None:
        """A request that waits holds no room, whatever it would have read."""
        if request.has_encoder_inputs:
            self.cache.free(request)

    def _is_past(self, start: int, item_end: int) -> bool:
        """Whether an item's tokens are computed already."""
        if self.is_encoder_decoder:
            # Cross attention keeps its own KV: the first step encodes everything.
            return start > 0
        return item_end <= start

    def _limit(
        self,
        request: Request,
        index: int,
        start: int,
        decision: EncoderDecision,
        num_embeds_to_schedule: int,
    ) -> int | None:
        """Return the tokens before an item that cannot be taken; None if it can."""
        position = request.mm_features[index].mm_position
        before_item = max(0, position.offset - (start + self.shift))
        is_partial = start + decision.num_new_tokens < position.offset + position.length
        if self.disable_chunked_mm_input and start < position.offset and is_partial:
            return before_item
        if self.cache.can_allocate(request, index, decision.budget, num_embeds_to_schedule):
            return None
        return before_item

    def _needs_embeds(self, position: Any, start: int, num_new_tokens: int) -> bool:
        """Whether any of an item's embeddings stands in the scheduled range."""
        if self.is_encoder_decoder:
            return True
        first = max(0, start - position.offset)
        last = min(start + num_new_tokens + self.shift - position.offset, position.length)
        first_embed, last_embed = position.get_embeds_indices_in_range(first, last)
        return bool(last_embed > first_embed)

    def num_encoder_tokens(self, request: Request, decision: EncoderDecision) -> int:
        """Return the encoder tokens that cross-attention blocks must hold; 0 for decoders."""
        if not self.is_encoder_decoder:
            return 0
        items = decision.compute + decision.external
        return sum(request.get_num_encoder_embeds(index) for index in items)

    def commit(self, request: Request, decision: EncoderDecision) -> None:
        """Give the chosen items their room, now that the request is scheduled."""
        for index in decision.compute + decision.external:
            self.cache.allocate(request, index)
            if self.ec_connector is not None:
                self.ec_connector.update_state_after_alloc(request, index)

    def free_passed(self, request: Request) -> None:
        """Let go of encoder outputs whose tokens are in the KV cache now."""
        # Tokens of steps that have not returned yet may still read the encoder's output.
        computed = request.num_settled_tokens
        for index in self.cache.get_cached_input_ids(request):
            position = request.mm_features[index].mm_position
            if self.is_encoder_decoder:
                is_past = computed > 0
            else:
                is_past = position.offset + position.length <= computed
            if is_past:
                self.cache.free_encoder_input(request, index)
