"""Responses kept for later requests: bounded in number, bytes and age."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import ResponseNotFoundError

Item = Mapping[str, Any]
# The field of a body that names the response to continue.
_PREVIOUS = "previous_response_id"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended, and what it was made from.

    Attributes:
        response_id: Its id.
        previous_id: The response it continues; None: it begins a conversation.
        input_items: What its own request brought, ids included.
        output_items: What the model answered.
        body: The response as JSON.
        events: The events of a background response, as they were sent; others keep none.
        num_bytes: Room it takes in the store.
        is_background: Whether nobody waited for it.
        can_continue: Whether a later request may continue it: it did not fail.
    """

    response_id: str
    previous_id: str | None
    input_items: Sequence[Item]
    output_items: Sequence[Item]
    body: bytes
    num_bytes: int
    events: Sequence[bytes] = ()
    is_background: bool = False
    can_continue: bool = True

    @property
    def items(self) -> list[Item]:
        """Input, then output."""
        return [*self.input_items, *self.output_items]


class ResponseStore:
    """The responses that may still be asked for; the least recently used go first.

    Reading one counts as use of the responses that it continues, so a conversation stays whole
    while it goes on.

    Owns: the stored responses and where each of their items is.

    Args:
        max_responses: How many to keep.
        max_bytes: How much to keep.
        max_age_s: For how long, since they were stored.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        max_responses: int,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_use: OrderedDict[str, StoredResponse] = OrderedDict()
        self._stored_at: OrderedDict[str, float] = OrderedDict()
        self._item_owners: dict[str, str] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        """How many responses are kept."""
        return len(self._by_use)

    @property
    def num_bytes(self) -> int:
        """Room that they take."""
        return self._num_bytes

    def put(self, response: StoredResponse) -> bool:
        """Keep a response, at the cost of others; False if it alone is above the bounds."""
        self._drop_expired()
        self._drop(response.response_id)
        if response.num_bytes > self._max_bytes or self._max_responses < 1:
            return False
        self._by_use[response.response_id] = response
        self._stored_at[response.response_id] = self._clock()
        self._num_bytes += response.num_bytes
        for item in response.items:
            # The first owner stays: a client that sends an id of another's takes nothing over.
            self._item_owners.setdefault(item["id"], response.response_id)
        while len(self._by_use) > self._max_responses or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_use)))
        return True

    def __contains__(self, response_id: str) -> bool:
        """Whether a response is kept."""
        self._drop_expired()
        return response_id in self._by_use

    def get(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response.

        Args:
            response_id: Its id.
            param: The field of a body that names it; None: the path does.

        Raises:
            ResponseNotFoundError: It was never stored, or is not any more.
        """
        return self._chain(response_id, param)[-1]

    def history(self, response_id: str) -> list[Item]:
        """Return the items of a whole conversation up to a response, oldest first.

        Raises:
            ResponseNotFoundError: A response of it is not stored any more.
        """
        chain = self._chain(response_id, _PREVIOUS)
        first = chain[0]
        if first.previous_id is not None:
            raise ResponseNotFoundError(
                f"The response {response_id!r} continues {first.previous_id!r}, which is not "
                "stored any more: send the conversation's items as input.",
                _PREVIOUS,
            )
        return [item for response in chain for item in response.items]

    def find_item(self, item_id: str) -> Item:
        """Return an item of a stored response.

        Raises:
            ResponseNotFoundError: No stored response has it.
        """
        self._drop_expired()
        owner = self._by_use.get(self._item_owners.get(item_id, ""))
        if owner is not None:
            for item in owner.items:
                if item["id"] == item_id:
                    return item
        raise ResponseNotFoundError(
            f"No stored response has the item {item_id!r}: send the item itself.", "input"
        )

    def delete(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            ResponseNotFoundError: There is no such response.
        """
        self.get(response_id)
        self._drop(response_id)

    def _chain(self, response_id: str, param: str | None) -> list[StoredResponse]:
        """A response and those it continues, as far as they are stored; oldest first."""
        self._drop_expired()
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None and next_id in self._by_use:
            chain.append(self._by_use[next_id])
            next_id = chain[-1].previous_id
        if not chain:
            raise ResponseNotFoundError(
                f"There is no response {response_id!r}: it was not stored (store=false), was "
                "deleted, or made room for others.",
                param,
            )
        chain.reverse()
        # The newest last: of a conversation that is left alone its beginning goes first.
        for response in chain:
            self._by_use.move_to_end(response.response_id)
        return chain

    def _drop_expired(self) -> None:
        oldest_allowed = self._clock() - self._max_age_s
        while self._stored_at and next(iter(self._stored_at.values())) < oldest_allowed:
            self._drop(next(iter(self._stored_at)))

    def _drop(self, response_id: str) -> None:
        response = self._by_use.pop(response_id, None)
        if response is None:
            return
        del self._stored_at[response_id]
        self._num_bytes -= response.num_bytes
        for item in response.items:
            if self._item_owners.get(item["id"]) == response_id:
                del self._item_owners[item["id"]]
