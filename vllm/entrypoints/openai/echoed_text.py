"""A prompt's text in front of its answer's: together the text of all tokens.

The engine decodes an answer by itself. Where a character begins in the prompt's last tokens and
ends in the answer's first, both show a mark of bad bytes:

    prompt    ... F0 9F         "...\\ufffd"
    answer    8F 94 a           "\\ufffd\\ufffda"
    together                    "...🏔a"
"""

import codecs
from collections.abc import Sequence

from vllm.tokenizers import Tokenizer

_BAD = "\ufffd"
# A character has four bytes at most.
_MAX_TOKENS = 4


class EchoedText:
    """Joins the texts of a prompt and of one answer to it, output by output.

    Owns: the bytes of a character that the prompt leaves open.

    Args:
        tokenizer: The model's.
        token_ids: The prompt's.
        text: Its text, if it was given as one.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None) -> None:
        self._tokenizer = tokenizer
        last = token_ids[-_MAX_TOKENS:] if text is None else ()
        # Bytes of the open character so far.
        self._open = _find_open(b"".join(map(tokenizer.token_bytes, last)))
        whole = tokenizer.decode(token_ids) if text is None else text
        self._begin = whole.removesuffix(_BAD) if self._open else whole
        # Marks of the answer's text that stand for bytes of that character.
        self._num_marks = 0

    def push(self, token_ids: Sequence[int], text: str, *, is_last: bool) -> str:
        """Return what the next output of the engine adds; the first brings the prompt.

        Args:
            token_ids: Of the output.
            text: Its text.
            is_last: Whether the answer ends with it.
        """
        shown, self._begin = self._begin, ""
        for token_id in token_ids:
            for byte in self._tokenizer.token_bytes(token_id):
                if self._open:
                    shown += self._close(byte)
        while self._num_marks and text.startswith(_BAD):
            text = text[1:]
            self._num_marks -= 1
        if is_last and self._open:
            self._open = b""
            shown += _BAD
        return shown + text

    def _close(self, byte: int) -> str:
        """Take a byte of the answer into the open character; return that if it has ended."""
        longer = self._open + bytes([byte])
        self._open = longer if _find_open(longer) == longer else b""
        try:
            shown = "" if self._open else longer.decode()
        except UnicodeDecodeError:
            return _BAD  # the byte begins another character, or is none
        # In other vocabularies the engine has seen the prompt's end, and shows no mark.
        self._num_marks += self._tokenizer.is_byte_level
        return shown


def _find_open(data: bytes) -> bytes:
    """Return the bytes at the end of some that begin a character and do not end it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]
