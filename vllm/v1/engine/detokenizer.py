"""From a growing list of token ids to a growing text, with stop strings.

    token ids --TextStream--> text pieces --Detokenizer--> text, stop string, what may be shown

A token can be part of a character, so a stream may owe bytes: it hands out whole characters only,
and what is still owed at the end shows as U+FFFD. The text so far plus what is owed always equals
decoding all ids at once.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer

# Tokens of context before the first new one; enough for every decoder's rule about spaces.
_CONTEXT_TOKENS = 6
# Text older than this is set aside, so that a long answer costs linear time.
_TAIL_CHARS = 4096


class TextStream(Protocol):
    """Decodes one token after another."""

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""

    def finish(self) -> str:
        """Return what is left when no token follows."""


class ByteTextStream:
    """For byte-level vocabularies: a token is a byte string, the text their UTF-8 decoding.

    Exact and O(1) for a token, also in noise that is never valid UTF-8.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class WindowTextStream:
    """For all other vocabularies: the difference that a token makes to a decoded window.

    The window starts at tokens whose text is known, so that decoders that look at neighbours
    (leading spaces, byte fallback) see what they need:

        ids    ... | c c c c c c | n n n n
                   ^window       ^shown: the text before it has been handed out

    A window that ends in a part of a character waits for the rest, or for what shows that there is
    none.

    Args:
        decode: Text of ids; bytes as UTF-8, a bad sequence as U+FFFD.
        prompt_token_ids: What stands before the answer.
        byte_ids: Tokens that stand for a byte each.
        skipped_ids: Tokens that ``decode`` leaves out.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        byte_ids: Mapping[int, int] | None = None,
        skipped_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids or {}
        self._skipped_ids = skipped_ids
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._num_shown_ids = len(self._window)
        self._shown = decode(self._window)

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        self._window.append(token_id)
        if self._is_within_character(token_id):
            return ""
        text = self._decode(self._window)
        if len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        # The tokens shown just now become the context of the next ones.
        self._window = self._window[self._num_shown_ids :]
        self._num_shown_ids = len(self._window)
        self._shown = self._decode(self._window)
        return piece

    def _is_within_character(self, token_id: int) -> bool:
        byte = self._byte_ids.get(token_id)
        if byte is not None:
            self._bytes.decode(bytes([byte]))
        elif token_id not in self._skipped_ids:
            self._bytes.reset()
        return bool(self._bytes.getstate()[0])

    def finish(self) -> str:
        """Return what was held back."""
        return self._decode(self._window)[len(self._shown) :]


def make_text_stream(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
) -> TextStream:
    """Choose how to decode the answer to a prompt."""
    skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return ByteTextStream(tokenizer.token_bytes, skipped)
    return WindowTextStream(
        lambda ids: tokenizer.decode(ids, skip_special_tokens),
        prompt_token_ids,
        tokenizer.byte_ids,
        skipped,
    )


def find_stop_string(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Find the stop string that ends first.

    The one that ends first, not the one that starts first: the answer must not depend on how the
    text is cut into tokens, and the first end is where a text that came letter by letter stops.

    Args:
        text: All text so far.
        start: Matches that end at or before this index do not count.
        stops: The stop strings, none empty.

    Returns:
        Where the match begins, and the stop string (the longest of those that end there).
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, start - len(stop) + 1))
        if begin < 0:
            continue
        candidate = (begin + len(stop), begin, stop)
        if best is None or candidate < best:
            best = candidate
    return None if best is None else best[1:]


class Detokenizer:
    """The text of one answer.

    Owns: the text, the stream, and how much of the text has been handed out.

        set aside (parts)          | tail
        0                          ^base        ^shown       ^shown + held back = end

    Args:
        stream: Decodes the answer's tokens; None: there is no text to make.
        params: Of the request.
    """

    def __init__(self, stream: TextStream | None, params: SamplingParams) -> None:
        self._stream = stream
        self._stops = params.stop_strings if stream is not None else []
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._longest_stop = max(map(len, self._stops), default=0)
        # The start of a stop string must not be shown before it is sure that it is none.
        self._num_held = 0 if self._include_stop else max(0, self._longest_stop - 1)
        self._parts: list[str] = []
        self._base = 0
        self._tail = ""
        self._num_tokens = 0
        self._num_checked = 0
        self._num_shown = 0

    @property
    def text(self) -> str:
        """All text so far, cut at the stop string."""
        return "".join(self._parts) + self._tail

    def push(self, token_id: int) -> str | None:
        """Add a token; return the stop string that it completes, having cut the text there."""
        self._num_tokens += 1
        return None if self._stream is None else self._append(self._stream.push(token_id))

    def finish(self) -> str | None:
        """Flush what the stream held back; return a stop string that this completes."""
        return None if self._stream is None else self._append(self._stream.finish())

    def take_text(self, *, delta: bool, finished: bool) -> str:
        """Return the text to hand out now: what is new, or all."""
        length = self._base + len(self._tail)
        end = length if finished else max(self._num_shown, length - self._num_held)
        begin = self._num_shown if delta else 0
        self._num_shown = end
        if begin >= self._base:
            return self._tail[begin - self._base : end - self._base]
        return self.text[begin:end]

    def _append(self, piece: str) -> str | None:
        if not piece:
            return None
        self._tail += piece
        start, self._num_checked = self._num_checked, self._base + len(self._tail)
        if self._stops and self._num_tokens >= self._min_tokens:
            found = find_stop_string(self._tail, start - self._base, self._stops)
            if found is not None:
                begin, stop = found
                self._tail = self._tail[: begin + len(stop) if self._include_stop else begin]
                return stop
        if len(self._tail) > 2 * (_TAIL_CHARS + self._longest_stop):
            self._set_aside()
        return None

    def _set_aside(self) -> None:
        cut = len(self._tail) - _TAIL_CHARS - self._longest_stop
        self._parts.append(self._tail[:cut])
        self._tail = self._tail[cut:]
        self._base += cut
