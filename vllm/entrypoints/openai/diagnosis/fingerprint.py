"""What is remembered of a request's prompt: digests and token counts, no text and no token.

    prompt    | t0 t1 t2 ... | ... |          marks[k]: digest of the tokens before (k + 1) * stride
    request   model, tools, system, messages, ...: a digest of each

Two prompts begin alike as far as their marks do. A stride is 1 for prompts of up to 12,288 tokens,
and the least power of two that keeps the marks of longer ones within their room.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.entrypoints.openai.pipeline.chat_task import PreparedChat
from vllm.entrypoints.openai.protocol.requests import SamplingRequest
from vllm.multimodal.comparison import comparable_ids
from vllm.tokenizers import ChatOptions

# With 8 bytes for each of so many messages, and 4 for each mark, a fingerprint stays below 64 KiB.
_MAX_MARKS = 12_288
_MAX_MESSAGES = 1_536
_DIGEST_BYTES = 8
_MAX_TEMPLATE_CHARS = 1_024
# Roles of messages that belong to the system part where they stand at the beginning.
_SYSTEM_ROLES = ("system", "developer")
_FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
)
# splitmix64's: they spread any difference over all bits.
_GAMMA, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


class Fingerprint(msgspec.Struct, frozen=True):
    """A request as far as later ones may be compared with it.

    Attributes:
        owner: Digest of tenant and salt: whose prefixes it may share.
        model: As the response names it.
        num_tokens: Of the prompt.
        stride: Tokens from one mark to the next.
        marks: 4 bytes each.
        parts: Digests of ``tools``, ``tool_choice`` and ``text_format``.
        system: Digest of the system part.
        messages: Digests of the messages behind it, 8 bytes each, of the first 1,536.
        num_messages: All of them.
        num_entries: The same as the API counts them.
        num_said: Tokens before those that open an answer; all, where that is not known.
        effort: The reasoning effort that was asked for.
        template: The template's arguments as JSON; a digest where they are long.
        cache_key: Digest of ``prompt_cache_key``.
    """

    owner: bytes
    model: str
    num_tokens: int
    stride: int
    marks: bytes
    parts: dict[str, bytes]
    system: bytes
    messages: bytes
    num_messages: int
    num_entries: int
    num_said: int
    effort: str | None
    template: str
    cache_key: bytes

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return len(self.marks) + len(self.messages) + len(self.template) + 1_024

    def message_digests(self) -> list[bytes]:
        """Those of the first messages behind the system part."""
        held = self.messages
        return [held[i : i + _DIGEST_BYTES] for i in range(0, len(held), _DIGEST_BYTES)]


def owner_digest(tenant: str | None, salt: str | None) -> bytes:
    """Return whose prefixes a request may share, as a digest."""
    return blake2b(msgspec.json.encode([tenant, salt]), digest_size=16).digest()


def make_fingerprint(
    chat: PreparedChat, request: SamplingRequest, model: str, owner: bytes
) -> Fingerprint:
    """Return a chat's fingerprint. Takes about 100 ns a token, and a hash of the texts.

    Args:
        chat: As it goes to the engine.
        request: Its other fields.
        model: As the response names it.
        owner: See ``owner_digest``.
    """
    task = chat.task
    token_ids = comparable_ids(chat.prompt.token_ids, chat.prompt.images)
    num_system = count_system(task.messages)
    messages = task.messages[num_system:]
    stride = _find_stride(len(token_ids))
    digest = _Digester(owner)
    form = {name: value for name in _FORM_FIELDS if (value := getattr(request, name)) is not None}
    choice = task.tool_choice if task.tools else None
    return Fingerprint(
        owner=owner,
        model=model,
        num_tokens=len(token_ids),
        stride=stride,
        marks=prefix_digests(token_ids, owner)[stride - 1 :: stride].tobytes(),
        parts={
            "tools": digest([tool.function for tool in task.tools]),
            "tool_choice": digest([choice and (choice.mode, choice.name), task.has_form]),
            "text_format": digest(form),
        },
        system=digest(task.messages[:num_system]),
        messages=b"".join(map(digest, messages[:_MAX_MESSAGES])),
        num_messages=len(messages),
        num_entries=len(task.messages) if task.num_entries is None else task.num_entries,
        num_said=chat.num_said,
        effort=task.options.reasoning_effort,
        template=_spell_template(task.options, digest),
        cache_key=digest(request.prompt_cache_key),
    )


def count_system(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many messages at the beginning of a chat are its system part."""
    for i, message in enumerate(messages):
        if message.get("role") not in _SYSTEM_ROLES:
            return i
    return len(messages)


def prefix_digests(token_ids: Sequence[int], owner: bytes) -> npt.NDArray[np.uint32]:
    """Return a digest of each of a prompt's beginnings: of one token, of two, ..., of all.

    Of two prompts of one owner, the first digest that differs is that of the first token that does,
    but for one pair in four billion.
    """
    key = np.uint64(int.from_bytes(owner[:8], "little"))
    with np.errstate(over="ignore"):
        places = np.arange(1, len(token_ids) + 1, dtype=np.uint64) * _GAMMA + key
        each = _mix(_mix(np.asarray(token_ids, dtype=np.uint64) + key) + places)
        chained = _mix(np.add.accumulate(each, dtype=np.uint64))
    return (chained >> np.uint64(32)).astype(np.uint32)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


def count_shared(old: Fingerprint, token_ids: Sequence[int]) -> int:
    """Return how many tokens a prompt shares with an earlier one, down to that one's stride.

    Args:
        old: The earlier one.
        token_ids: Of the prompt, as prompts are compared (``comparable_ids``).
    """
    marks = np.frombuffer(old.marks, np.uint32)
    own = prefix_digests(token_ids, old.owner)[old.stride - 1 :: old.stride][: len(marks)]
    differs = np.flatnonzero(own != marks[: len(own)])
    return (int(differs[0]) if len(differs) else len(own)) * old.stride


def count_common(one: Fingerprint, other: Fingerprint) -> int:
    """Return how many tokens two prompts of one owner share, down to the longer stride."""
    stride = max(one.stride, other.stride)
    marks = [
        np.frombuffer(of.marks, np.uint32)[stride // of.stride - 1 :: stride // of.stride]
        for of in (one, other)
    ]
    num = min(map(len, marks))
    differs = np.flatnonzero(marks[0][:num] != marks[1][:num])
    return (int(differs[0]) if len(differs) else num) * stride


def _find_stride(num_tokens: int) -> int:
    stride = 1
    while num_tokens > _MAX_MARKS * stride:
        stride *= 2
    return stride


class _Digester:
    """Digests of JSON values, of no use to another owner."""

    def __init__(self, owner: bytes) -> None:
        self._owner = owner

    def __call__(self, value: Any) -> bytes:
        encoded = msgspec.json.encode(value)
        return blake2b(encoded, digest_size=_DIGEST_BYTES, key=self._owner).digest()


def _spell_template(options: ChatOptions, digest: _Digester) -> str:
    spelled = msgspec.json.encode(dict(options.template_kwargs), order="sorted")
    return (
        spelled.decode() if len(spelled) <= _MAX_TEMPLATE_CHARS else digest(spelled.decode()).hex()
    )
