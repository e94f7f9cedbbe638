"""What JSON may not go on to although its grammar lets it: numbers without end, a key twice.

A grammar lets a number have any number of digits, an object with keys of the model's own choosing
have one of them again and again, and an answer call the same again and again. A model that begins
so does not stop. All are followed here, token by token, and taken out of masks:

* behind ``MAX_DIGITS`` digits in a row no further one comes;
* no key is written that its object has;
* behind a call that the answer has already it ends, where it may.

Each unless nothing else may follow: what a schema asks for goes first. Texts may have as many
digits as they like.
"""

import copy
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from vllm.v1.structured_output.closed_objects import find_schemas
from vllm.v1.structured_output.mask_bits import BITS, forbid_tokens, is_allowed
from vllm.v1.structured_output.repeats import RepeatedCalls

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As many as the numbers of 64 bits have, and more than a float of 64 bits can tell apart.
MAX_DIGITS = 20
_DIGITS = "0123456789"
_QUOTE = b'"'
# What may go on a text, and no number.
_OF_TEXTS = ("a", '"', "-")
# A token that stands for one byte.
_BYTE_TOKEN = re.compile(r"<0x(?:3[0-9]|22)>")
# Keywords that say of a value without a type what it is.
_SAYING = ("items", "prefixItems", "enum", "const", "$ref", "allOf", "anyOf", "oneOf")
_IS_ALL, _MOST_COUNTED = 128, 127
_WHOLE_KEY = re.compile(rb'[\s,]*"([^"\\]*)"')
_STRUCTURE = re.compile(rb'["{}\[\],:]')
_MANY_DIGITS = re.compile(rf"[0-9]{{{MAX_DIGITS}}}")
# Keywords by which texts, or keys, may have to go on with digits; the last two are formats of tags.
_SHAPING = ("pattern", "format")
_SHAPING_KEYS = ("patternProperties", "propertyNames")
_SHAPED = ("regex", "grammar")
_TEXT_MARK = re.compile(rb'["\\]')


def has_free_keys(schema: Mapping[str, Any]) -> bool:
    """Whether objects of a schema may have keys that it does not name."""
    return any(_has_own_free_keys(part) for part in find_schemas(schema))


def _has_own_free_keys(schema: Mapping[str, Any]) -> bool:
    if schema.get("patternProperties"):
        return True
    if schema.get("additionalProperties", True) is False:
        return False
    kind = schema.get("type")
    if kind is not None:
        return "object" in kind if isinstance(kind, list) else kind == "object"
    # What says nothing lets any value be.
    is_of_objects = "properties" in schema or "additionalProperties" in schema
    return is_of_objects or not any(key in schema for key in _SAYING)


def may_ask_for_digits(value: Any) -> bool:
    """Whether a structural tag may ask for more digits in a row than numbers have.

    Args:
        value: Of JSON: the tag.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str) and _MANY_DIGITS.search(item):
            return True
        if isinstance(item, list):
            waiting += item
        if not isinstance(item, dict):
            continue
        if item.get("type") in _SHAPED or any(isinstance(item.get(key), str) for key in _SHAPING):
            return True
        if any(key in item for key in _SHAPING_KEYS):
            return True
        waiting += [*item, *item.values()]
    return False


class JsonTokens:
    """A vocabulary, as far as numbers and keys go.

    Args:
        tokenizer: Of the library.
        ids: The vocabulary's tokens by their text.
        vocab_size: V of its logits.
    """

    def __init__(self, tokenizer: "LLTokenizer", ids: Mapping[str, int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        # By token: digits at its end, and whether it is nothing else.
        self._tails = bytearray(vocab_size)
        digits: list[int] = []
        quoted: list[tuple[bytes, int]] = []
        for text, token_id in ids.items():
            if token_id >= vocab_size:
                continue
            if _BYTE_TOKEN.fullmatch(text):
                text = tokenizer.decode_bytes([token_id]).decode("latin-1")
            num_tail = len(text) - len(text.rstrip(_DIGITS))
            if num_tail:
                is_all = _IS_ALL if num_tail == len(text) else 0
                self._tails[token_id] = min(num_tail, _MOST_COUNTED) | is_all
            if text[:1] in _DIGITS and text:
                digits.append(token_id)
            if '"' in text and not tokenizer.is_special_token(token_id):
                quoted.append((tokenizer.decode_bytes([token_id]), token_id))
        self._quoted = sorted(quoted)
        # By key: tokens, and whether they end a value before it.
        self._whole_keys: dict[bytes, list[tuple[int, bool]]] = {}
        for content, token_id in quoted:
            if (key := _WHOLE_KEY.match(content)) is not None:
                follows = b"," in content[: key.start(1)]
                self._whole_keys.setdefault(key[1], []).append((token_id, follows))
        self._of_texts = [ids[text] for text in _OF_TEXTS if text in ids]
        others = np.full((1, -(-vocab_size // BITS)), -1, dtype=np.int32)
        forbid_tokens(others, range(1), digits)
        self._no_digits = others[0]

    def count_digits(self, num_before: int, token_id: int) -> int:
        """Return how many digits end a text behind another token."""
        tail = self._tails[token_id]
        return num_before + (tail & _MOST_COUNTED) if tail & _IS_ALL else tail

    def bar_digits(self, bits: np.ndarray, row: int) -> None:
        """Let no digit follow a number, unless nothing else may.

        Mutates: ``bits``, int32 ``[R, ceil(V / 32)]``.
        """
        if any(is_allowed(bits, row, token_id) for token_id in self._of_texts):
            return
        others = bits[row] & self._no_digits
        if others.any():
            bits[row] = others

    def find_beginning(self, beginning: bytes) -> list[int]:
        """Return the tokens that begin with some bytes, a quote among them."""
        at = bisect_left(self._quoted, (beginning, -1))
        found = []
        while at < len(self._quoted) and self._quoted[at][0].startswith(beginning):
            found.append(self._quoted[at][1])
            at += 1
        return found

    def find_whole_keys(self, keys: Iterable[bytes], *, behind_value: bool) -> list[int]:
        """Return the tokens that are a whole one of some keys.

        Args:
            keys: As they are spelt.
            behind_value: Only those that end a value before the key.
        """
        found = [own for key in keys for own in self._whole_keys.get(key, ())]
        return [token_id for token_id, follows in found if follows or not behind_value]

    def find_single(self, content: bytes) -> int | None:
        """Return the token that some bytes are; None: they are several, or none."""
        try:
            token_ids = self._tokenizer.greedy_tokenize(content.decode()) if content else []
        except UnicodeDecodeError:
            return None
        return token_ids[0] if len(token_ids) == 1 else None

    def spell(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens."""
        return self._tokenizer.decode_bytes(list(token_ids))


class UsedKeys:
    """Follows JSON as it is written: the keys that each open object has.

    Owns: open objects and lists, and the text that is being written if it is a key.
    """

    def __init__(self) -> None:
        # Of each open object its keys, as they were spelt; None: a list.
        self._open: list[set[bytes] | None] = []
        self._key: bytearray | None = None
        self._is_in_text = self._is_escaped = False
        self._expects_key = self._expects_value = False
        self._has_begun = self._is_whole = False

    def copy(self) -> Self:
        """Return another that stands where this one does."""
        made = copy.copy(self)
        made._open = [None if keys is None else set(keys) for keys in self._open]
        made._key = None if self._key is None else bytearray(self._key)
        return made

    @property
    def used(self) -> set[bytes]:
        """The keys of the object that is written now."""
        return (self._open[-1] if self._open else None) or set()

    @property
    def key(self) -> bytes | None:
        """What of a key was written; None: no key is being written."""
        return None if self._key is None else bytes(self._key)

    @property
    def is_in_text(self) -> bool:
        """Whether a text is being written, a key or not."""
        return self._is_in_text

    @property
    def expects_value(self) -> bool:
        """Whether a key's value comes next, or one is being written that is no text."""
        return self._expects_value

    def feed(self, content: bytes) -> None:
        """Take in what was written next."""
        at = 0
        while at < len(content):
            at = self._feed_part(content, at)

    def feed_value(self, content: bytes, at: int) -> int:
        """Take in what was written of one object or list, from a position on.

        Returns:
            Where it has ended, which is at once where none begins; else how long ``content`` is.
        """
        if not self._has_begun:
            at += len(content[at:]) - len(content[at:].lstrip())
            if at == len(content) or content[at : at + 1] not in (b"{", b"["):
                self._is_whole = at < len(content)
                return at
            self._has_begun = True
        while at < len(content) and not self._is_whole:
            at = self._feed_part(content, at)
            self._is_whole = not self._open
        return at

    @property
    def is_whole(self) -> bool:
        """Whether the one value that ``feed_value`` reads has ended."""
        return self._is_whole

    def _feed_part(self, content: bytes, at: int) -> int:
        return (
            self._feed_text(content, at) if self._is_in_text else self._feed_structure(content, at)
        )

    def _feed_structure(self, content: bytes, at: int) -> int:
        mark = _STRUCTURE.search(content, at)
        if mark is None:
            return len(content)
        self._expects_value = mark[0] == b":"
        if mark[0] == _QUOTE:
            self._is_in_text = True
            self._key = bytearray() if self._expects_key else None
            self._expects_key = False
        elif mark[0] in b"{[":
            self._expects_key = mark[0] == b"{"
            self._open.append(set() if self._expects_key else None)
        elif mark[0] == b",":
            self._expects_key = bool(self._open) and self._open[-1] is not None
        elif mark[0] in b"}]":
            self._expects_key = False
            if self._open:
                self._open.pop()
        return mark.end()

    def _feed_text(self, content: bytes, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return self._take(content, at, at + 1)
        mark = _TEXT_MARK.search(content, at)
        if mark is None:
            return self._take(content, at, len(content))
        if mark[0] == _QUOTE:
            self._take(content, at, mark.start())
            if self._key is not None and self._open and (keys := self._open[-1]) is not None:
                keys.add(bytes(self._key))
            self._key, self._is_in_text = None, False
        else:
            self._take(content, at, mark.end())
            self._is_escaped = True
        return mark.end()

    def _take(self, content: bytes, begin: int, end: int) -> int:
        if self._key is not None:
            self._key += content[begin:end]
        return end


class TaggedKeys:
    """Follows JSON between tags, behind known texts: the keys that each open object has.

    Owns: the JSON that is being written, and the end of the text before it.

    Args:
        heads: What stands before such JSON.
    """

    def __init__(self, heads: Sequence[bytes]) -> None:
        self._heads = re.compile(b"|".join(re.escape(head) for head in heads))
        self._longest = max(map(len, heads))
        self._tail = b""
        self._value: UsedKeys | None = None

    def copy(self) -> Self:
        """Return another that stands where this one does."""
        made = copy.copy(self)
        made._value = None if self._value is None else self._value.copy()
        return made

    @property
    def used(self) -> set[bytes]:
        """See ``UsedKeys``."""
        return set() if self._value is None else self._value.used

    @property
    def key(self) -> bytes | None:
        """See ``UsedKeys``."""
        return None if self._value is None else self._value.key

    @property
    def is_in_text(self) -> bool:
        """See ``UsedKeys``; not so outside the JSON that is followed."""
        return self._value is not None and self._value.is_in_text

    @property
    def expects_value(self) -> bool:
        """See ``UsedKeys``."""
        return self._value is not None and self._value.expects_value

    def feed(self, content: bytes) -> None:
        """Take in what was written next."""
        at = 0
        while at < len(content):
            if self._value is None:
                at = self._find_value(content, at)
                continue
            at = self._value.feed_value(content, at)
            if self._value.is_whole:
                self._value = None

    def _find_value(self, content: bytes, at: int) -> int:
        """Look for a text before JSON; return where that begins, or how long ``content`` is."""
        seen = self._tail + content[at:]
        head = self._heads.search(seen)
        if head is None:
            self._tail = seen[-self._longest :]
            return len(content)
        self._value, self._tail = UsedKeys(), b""
        return at + head.end() - (len(seen) - len(content[at:]))


class JsonRules:
    """What one answer may not go on to.

    Owns: how many digits it ends with, its keys, and its calls where these must not come twice.

    Args:
        tokens: The vocabulary's.
        keys: Of the answer so far; None: no object in it has keys of the model's choosing, or it
            is not known where.
        has_free_keys: Whether an object may have keys that its schema does not name.
        bars_digits: Whether numbers end, outside the texts that are followed.
        calls: Of the answer so far; None: the grammar marks none that must not come twice.
    """

    def __init__(
        self,
        tokens: JsonTokens,
        keys: "UsedKeys | TaggedKeys | None",
        *,
        has_free_keys: bool = False,
        bars_digits: bool = True,
        calls: RepeatedCalls | None = None,
    ) -> None:
        self._tokens, self._keys, self._calls = tokens, keys, calls
        self._has_free_keys, self._bars_digits = has_free_keys, bars_digits
        self._num_digits = 0

    def copy(self) -> Self:
        """Return another that stands where this one does."""
        made = copy.copy(self)
        made._keys = None if self._keys is None else self._keys.copy()
        made._calls = None if self._calls is None else self._calls.copy()
        return made

    def feed(self, token_ids: Sequence[int]) -> None:
        """Take in what was written next."""
        for token_id in token_ids:
            self._num_digits = self._tokens.count_digits(self._num_digits, token_id)
        if self._keys is None and self._calls is None:
            return
        content = self._tokens.spell(token_ids)
        if self._keys is not None:
            self._keys.feed(content)
        if self._calls is not None:
            self._calls.feed(content)

    def restrict(
        self, bits: np.ndarray, row: int, matcher: "LLMatcher", end_ids: Iterable[int]
    ) -> None:
        """Take out of a mask what may not follow, unless nothing else may.

        Args:
            bits: int32 ``[R, ceil(V / 32)]``.
            row: The mask's.
            matcher: Made it.
            end_ids: Tokens that end an answer.

        Mutates: ``bits``.
        """
        if self._calls is not None:
            self._calls.restrict(bits, row, matcher, end_ids)
        is_in_text = self._keys is not None and self._keys.is_in_text
        if self._bars_digits and not is_in_text and self._num_digits >= MAX_DIGITS:
            self._tokens.bar_digits(bits, row)
        if self._keys is None or not (self._has_free_keys and self._keys.used):
            return
        barred = self._find_barred(self._keys, bits, row, matcher)
        if barred:
            before = bits[row].copy()
            forbid_tokens(bits, range(row, row + 1), barred)
            if not bits[row].any():
                bits[row] = before

    def _find_barred(
        self, keys: "UsedKeys | TaggedKeys", bits: np.ndarray, row: int, matcher: "LLMatcher"
    ) -> list[int]:
        """Tokens that would write a key again."""
        key = keys.key
        if key is None:
            if keys.is_in_text:
                return []
            return self._tokens.find_whole_keys(keys.used, behind_value=keys.expects_value)
        barred = []
        for used in keys.used:
            if not used.startswith(key):
                continue
            rest = used[len(key) :]
            barred += self._tokens.find_beginning(rest + _QUOTE)
            last = self._tokens.find_single(rest)
            if last is not None and is_allowed(bits, row, last) and _must_close(matcher, last):
                barred.append(last)
        return barred


def _must_close(matcher: "LLMatcher", token_id: int) -> bool:
    """Whether nothing but a quote follows a token."""
    ahead = matcher.deep_copy()
    return bool(ahead.consume_token(token_id)) and ahead.compute_ff_bytes().startswith(_QUOTE)
