"""Comparing requests with earlier ones: what both APIs ask, and where fingerprints are found."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec

from vllm.entrypoints.openai.context import ServingContext
from vllm.entrypoints.openai.diagnosis.comparison import (
    MESSAGES,
    Comparison,
    KeptComparison,
    NewRequest,
    compare,
    compare_kept,
)
from vllm.entrypoints.openai.diagnosis.fingerprint import (
    Fingerprint,
    count_system,
    make_fingerprint,
    owner_digest,
)
from vllm.entrypoints.openai.diagnosis.fingerprint_store import FingerprintStore
from vllm.entrypoints.openai.pipeline.chat_task import PreparedChat
from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.logger import init_logger
from vllm.v1.engine.tenant_limits import current_tenant

logger = init_logger(__name__)

# A shorter prompt's digests take less than a thread would.
_THREAD_TOKENS = 8_192
# Asks the other server processes for the fingerprint of a response and owner, as bytes. Without an
# owner the operator asks.
AskPeers = Callable[[str, bytes | None], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat whose request may be compared with others.

    Attributes:
        chat: As it goes to the engine.
        request: Its other fields.
        model: As the response names it.
        owner: Whose prefixes it may share.
    """

    chat: PreparedChat
    request: SamplingRequest
    model: str
    owner: bytes

    @classmethod
    def of(cls, chat: PreparedChat, request: SamplingRequest, model: str) -> "AskedChat":
        """Return the chat of the request that is being handled."""
        return cls(chat, request, model, owner_digest(current_tenant.get(), request.cache_salt))


class Diagnoses:
    """Remembers requests that answers were given to, and says what differs from them.

    Owns: the store.

    Args:
        store: For fingerprints.
    """

    def __init__(self, store: FingerprintStore) -> None:
        self._store = store
        self._ask_peers: AskPeers | None = None

    def set_peers(self, ask: AskPeers) -> None:
        """Ask other server processes for what is not here."""
        self._ask_peers = ask

    async def keep(self, response_id: str, asked: AskedChat, context: ServingContext) -> None:
        """Remember a request that was answered."""
        self._store.put(response_id, await _take_fingerprint(asked, context))

    def forget(self, response_id: str) -> None:
        """Forget a request, if it is remembered."""
        self._store.discard(response_id)

    def find_encoded(self, response_id: str, owner: bytes | None) -> bytes | None:
        """Return a fingerprint for another server process; None: it is not here."""
        found = self._store.find(response_id, owner)
        return None if found is None else msgspec.msgpack.encode(found)

    async def compare_kept(self, earlier_id: str, response_id: str) -> KeptComparison | None:
        """Compare two requests that were answered, for the operator; None: not both are known."""
        old, new = await self._find(earlier_id, None), await self._find(response_id, None)
        return None if old is None or new is None else compare_kept(old, new)

    async def compare(
        self, response_id: str, asked: AskedChat, context: ServingContext
    ) -> Comparison | None:
        """Compare a request with an earlier one; None: its owner has none of that id."""
        old = await self._find(response_id, asked.owner)
        if old is None:
            return None
        new = NewRequest(await _take_fingerprint(asked, context), asked.chat, context.chat_encoder)
        num_tokens = len(asked.chat.prompt.token_ids)
        found = await context.workers.run(num_tokens, lambda _: compare(old, new))
        logger.debug("Compared with %s: %s", response_id[:80], found)
        return _with_origin(found, asked.chat)

    async def _find(self, response_id: str, owner: bytes | None) -> Fingerprint | None:
        """Return a fingerprint from here or from another server process."""
        found = self._store.find(response_id, owner)
        if found is not None or self._ask_peers is None:
            return found
        encoded = await self._ask_peers(response_id, owner)
        return None if encoded is None else msgspec.msgpack.decode(encoded, type=Fingerprint)


async def _take_fingerprint(asked: AskedChat, context: ServingContext) -> Fingerprint:
    def take() -> Fingerprint:
        return make_fingerprint(asked.chat, asked.request, asked.model, asked.owner)

    num_tokens = len(asked.chat.prompt.token_ids)
    if num_tokens < _THREAD_TOKENS:
        return take()
    return await context.workers.run(num_tokens, lambda _: take())


def _with_origin(found: Comparison, chat: PreparedChat) -> Comparison:
    """The same, with the message's place as the API counts them."""
    first, origins = found.difference, chat.task.origins
    if first is None or first.component != MESSAGES or first.message_index is None:
        return found
    place = first.message_index + count_system(chat.task.messages)
    index = origins[place] if place < len(origins) else place
    return replace(found, difference=replace(first, message_index=index))
