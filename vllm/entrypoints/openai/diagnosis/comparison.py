"""What differs between a request and an earlier one, and which token is the first of it.

    old   | tools | system | m0 | m1 | m2 |            what the requests say: digests, part by part
    new   | tools | system | m0 | M1 | m2 | m3 |       what the prompts hold: tokens
                                 ^-- the first token that differs, and the part it is of

Of several parts that differ, the one is told that the first different token is of. Where a part
stands, only the chat format knows: it is found by encoding the new chat with another such part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from vllm.entrypoints.openai.diagnosis.fingerprint import (
    Fingerprint,
    count_common,
    count_shared,
    count_system,
)
from vllm.entrypoints.openai.pipeline.chat_task import ChatTask, PreparedChat
from vllm.exceptions import UserInputError
from vllm.multimodal.comparison import comparable_ids
from vllm.tokenizers import ChatEncoder, ChatOptions
from vllm.tokenizers.chat_tools import ToolSpec

MODEL = "model"
TOOLS = "tools"
TOOL_CHOICE = "tool_choice"
SYSTEM = "system"
MESSAGES = "messages"
TEXT_FORMAT = "text_format"
EFFORT = "reasoning_effort"
TEMPLATE = "chat_template_kwargs"
# The requests are equal, but their chat format has written another prompt.
CHAT_FORMAT = "chat_format"
OWNER = "owner"

# No part of a prompt: what only these differ in has equal tokens.
_NOT_IN_PROMPTS = (TEXT_FORMAT,)
_OTHER_TEXT = "\u241e"
_OTHER_TOOLS = (ToolSpec("other", {"name": "other", "parameters": {}}),)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that differs.

    Attributes:
        component: One of the names above.
        token_offset: Of the first token that differs, in the new prompt.
        message_index: Of ``MESSAGES``: which, behind the system part.
    """

    component: str
    token_offset: int
    message_index: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two requests.

    Attributes:
        num_shared: Tokens that both prompts begin with.
        num_old: Tokens of the earlier prompt.
        num_new: Tokens of the other one.
        difference: The first thing that differs; None: the one prompt goes on where the other ends.
        is_compacted: Whether earlier messages were replaced by fewer, in a shorter prompt.
        has_other_key: Whether ``prompt_cache_key`` differs.
    """

    num_shared: int
    num_old: int
    num_new: int
    difference: Difference | None
    is_compacted: bool = False
    has_other_key: bool = False


@dataclass(frozen=True, slots=True)
class KeptComparison:
    """Two requests that were answered.

    Attributes:
        shared_tokens: That both prompts begin with, to a few tokens for long prompts.
        earlier_tokens: Of the earlier prompt.
        prompt_tokens: Of the other one.
        differs: What differs: the components above, messages by their places behind the system
            part, or "owner": another tenant's or salt's, who share nothing.
    """

    shared_tokens: int
    earlier_tokens: int
    prompt_tokens: int
    differs: list[str]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """The request that is compared: its fingerprint, its chat and what encodes it."""

    fingerprint: Fingerprint
    chat: PreparedChat
    encoder: ChatEncoder


def compare(old: Fingerprint, new: NewRequest) -> Comparison:
    """Compare a request with an earlier one of the same owner.

    Encodes the chat again, a few times, where several parts differ: call it in a thread.
    """
    own = new.fingerprint
    prompt = new.chat.prompt
    num_shared = count_shared(old, comparable_ids(prompt.token_ids, prompt.images))
    return Comparison(
        num_shared=num_shared,
        num_old=old.num_tokens,
        num_new=own.num_tokens,
        difference=_find_difference(old, new, num_shared),
        is_compacted=(
            own.system == old.system
            and own.num_messages < old.num_messages
            and own.num_tokens < old.num_tokens
        ),
        has_other_key=own.cache_key != old.cache_key,
    )


def compare_kept(old: Fingerprint, new: Fingerprint) -> KeptComparison:
    """Compare two requests of which only fingerprints are left."""
    if old.owner != new.owner:
        return KeptComparison(0, old.num_tokens, new.num_tokens, [OWNER])
    parts = [MODEL] * (old.model != new.model) + [EFFORT] * (old.effort != new.effort)
    parts += [TEMPLATE] * (old.template != new.template)
    parts += [name for name in new.parts if new.parts[name] != old.parts.get(name)]
    parts += [SYSTEM] * (old.system != new.system)
    parts += [f"{MESSAGES}[{i}]" for i in _changed_messages(old, new)]
    num_shared = 0 if old.model != new.model else count_common(old, new)
    return KeptComparison(num_shared, old.num_tokens, new.num_tokens, parts)


def _find_difference(old: Fingerprint, new: NewRequest, num_shared: int) -> Difference | None:
    own = new.fingerprint
    if own.model != old.model:
        return Difference(MODEL, 0)
    # What is found exactly, by the earlier request's own value, comes first among equals.
    parts = [EFFORT] * (own.effort != old.effort) + [TEMPLATE] * (own.template != old.template)
    parts += [name for name in own.parts if own.parts[name] != old.parts.get(name)]
    parts += [SYSTEM] * (own.system != old.system)
    messages = _changed_messages(old, own)
    num_common = min(old.num_tokens, own.num_tokens)
    # Marks of long prompts stand apart: what is behind the last of them is not known to differ.
    agrees = num_shared + old.stride > num_common
    if agrees:
        # One goes on where the other ends; what differs then is nothing that the model is shown.
        unseen = [part for part in parts if part not in (TOOLS, SYSTEM)]
        return Difference(unseen[0], num_shared) if unseen else None
    if len(parts) == 1 and not messages:
        return Difference(parts[0], num_shared)
    if not parts and _goes_on(old, new, num_shared, messages):
        return None
    if not parts and not messages:
        return Difference(CHAT_FORMAT, num_shared)
    if not parts and len(messages) == 1:
        return Difference(MESSAGES, num_shared, messages[0])
    return _attribute(parts, messages, num_shared, _Places(old, new))


def _changed_messages(old: Fingerprint, new: Fingerprint) -> list[int]:
    """Messages at places that both requests have; what was appended or cut off is no change."""
    pairs = zip(old.message_digests(), new.message_digests(), strict=False)
    return [i for i, (one, other) in enumerate(pairs) if one != other]


def _goes_on(old: Fingerprint, new: NewRequest, num_shared: int, messages: Sequence[int]) -> bool:
    """Whether the one conversation is the other's beginning, but for what opens an answer.

    An API may show what was appended as a part of the message before it.
    """
    shorter, longer = sorted((old, new.fingerprint), key=lambda one: one.num_entries)
    num_more = longer.num_entries - shorter.num_entries
    is_joined = num_more > longer.num_messages - shorter.num_messages
    joins = [[], [shorter.num_messages - 1]] if is_joined else [[]]
    if num_more == 0 or messages not in joins:
        return False
    if num_shared + old.stride > shorter.num_said:
        return True
    if shorter.num_said < shorter.num_tokens:
        return False
    # Where the format has no mark of a message's beginning, encoding tells where its last one ends.
    places = _Places(old, new)
    return num_shared >= places.find_end(shorter.num_messages)


def _attribute(
    parts: Sequence[str], messages: Sequence[int], num_shared: int, places: "_Places"
) -> Difference:
    """Of several parts that differ, return the one that the first different token is of.

    A part's tokens lie from where it begins to where the next one does, so that it is the last one
    that begins at that token or before.
    """
    begins = [
        (begin, part)
        for part in parts
        if part not in _NOT_IN_PROMPTS and (begin := places.find(part)) is not None
    ]
    before = [entry for entry in begins if entry[0] <= num_shared]
    found = max(before, default=None, key=lambda entry: entry[0])
    if found is not None and found[1] == TOOLS and (found[0], SYSTEM) in before:
        found = (found[0], places.find_earlier(found[0]))
    index = _find_message(messages, num_shared, places)
    if index is not None and (found is None or places.find_message(index) > found[0]):
        return Difference(MESSAGES, num_shared, index)
    if found is not None:
        return Difference(found[1], num_shared)
    if begins:
        return Difference(min(begins)[1], num_shared)
    if messages:
        return Difference(MESSAGES, num_shared, messages[0])
    return Difference(parts[0], num_shared)


def _find_message(messages: Sequence[int], num_shared: int, places: "_Places") -> int | None:
    """Return the last of some messages that begins at a token or before; None: all are behind."""
    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        if places.find_message(messages[middle]) <= num_shared:
            low = middle + 1
        else:
            high = middle
    return messages[low - 1] if low else None


class _Places:
    """Where parts of the new prompt begin: found once, by encoding it with another such part."""

    def __init__(self, old: Fingerprint, new: NewRequest) -> None:
        self._old = old
        self._encoder = new.encoder
        self._task = new.chat.task
        self._token_ids = new.chat.prompt.token_ids
        self._num_system = count_system(new.chat.task.messages)
        self._found: dict[int, int] = {}

    def find(self, part: str) -> int | None:
        """Return the first token that depends on a part; None: none does."""
        begins = [self._num_same(task) for task in self._altered(part)]
        known = [begin for begin in begins if begin is not None]
        return min(known, default=None)

    def find_earlier(self, place: int) -> str:
        """Return which the format writes first, where tools and system begin at one place."""
        system = next(self._altered(SYSTEM))
        with_tools = _with_options(system, tools=_OTHER_TOOLS)
        without = self._encode(_with_options(system, tools=()))
        begin = _num_alike(without, self._encode(with_tools))
        return TOOLS if begin <= place else SYSTEM

    def find_message(self, index: int) -> int:
        """Return where a message begins; behind the prompt if it has no tokens of its own."""
        if index not in self._found:
            messages = list(self._task.messages)
            at = self._num_system + index
            messages[at:] = [_with_other_text(message) for message in messages[at:]]
            begin = self._num_same(replace(self._task, messages=messages))
            if begin is None:
                begin = self._num_same(replace(self._task, messages=messages[: at + 1]))
            self._found[index] = len(self._token_ids) if begin is None else begin
        return self._found[index]

    def find_end(self, num_messages: int) -> int:
        """Return where the first messages behind the system part end; 0 if that is not known."""
        messages = self._task.messages[: self._num_system + num_messages]
        closed = _with_options(
            self._task, add_generation_prompt=False, continue_final_message=False
        )
        return self._num_same(replace(closed, messages=messages)) or 0

    def _num_same(self, task: ChatTask) -> int | None:
        """Tokens that another chat's prompt begins with too; None: all are equal, or unknown."""
        other = self._encode(task)
        if not other:
            return None  # what the format does not take says nothing of where it would stand
        same = _num_alike(self._token_ids, other)
        return None if same == len(self._token_ids) == len(other) else same

    def _encode(self, task: ChatTask) -> Sequence[int]:
        try:
            return self._encoder.encode_chat(task.messages, task.options).token_ids
        except UserInputError:
            return ()

    def _altered(self, part: str) -> Iterator[ChatTask]:
        task, options = self._task, self._task.options
        if part == EFFORT:
            yield _with_options(task, reasoning_effort=self._old.effort)
        elif part == TEMPLATE:
            for kwargs in self._template_kwargs(options):
                yield _with_options(task, template_kwargs=kwargs)
        elif part in (TOOLS, TOOL_CHOICE):
            # The format's own words around them begin where there are none, too.
            yield _with_options(task, tools=() if options.tools else _OTHER_TOOLS)
        elif part == SYSTEM:
            system = [*map(_with_other_text, task.messages[: self._num_system])]
            rest = task.messages[self._num_system :]
            yield replace(
                task, messages=[*(system or [{"role": "system", "content": _OTHER_TEXT}]), *rest]
            )

    def _template_kwargs(self, options: ChatOptions) -> Iterator[Mapping[str, Any]]:
        """Arguments to compare with: the earlier ones, or if they are not known, none at all."""
        try:
            old = msgspec.json.decode(self._old.template)
        except msgspec.DecodeError:
            old = {}
        yield old if isinstance(old, dict) else {}


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_options(task: ChatTask, **fields: Any) -> ChatTask:
    return replace(task, options=replace(task.options, **fields))


def _with_other_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with other texts; its role and its calls stay: formats look at them."""
    thought = {"reasoning": _OTHER_TEXT} if message.get("reasoning") else {}
    return {**message, "content": _OTHER_TEXT, **thought}
