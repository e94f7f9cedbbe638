"""Log probabilities in the two dialects of the API."""

import codecs
from collections.abc import Sequence

from vllm.entrypoints.openai.protocol.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobsJson,
)
from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs, TokenLogprobs

# JSON has no -Infinity.
_FLOOR = -9999.0


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """Return how a token is spelled in a response.

    A token that is only a part of a character is spelled by its bytes: ``bytes:\\xe2\\x96``.
    """
    if as_ids:
        return f"token_id:{token_id}"
    if entry.token_bytes is not None:
        try:
            return entry.token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
    return entry.decoded_token or ""


def token_bytes(entry: Logprob) -> list[int]:
    """Return a token's bytes as numbers."""
    if entry.token_bytes is not None:
        return list(entry.token_bytes)
    return list((entry.decoded_token or "").encode())


def _most_likely(entries: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The ``num_top`` most likely tokens, best first; -1: all. Others are there as the sampled."""
    limit = len(entries) if num_top < 0 else num_top
    ranked = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return ranked[:limit]


class CompletionLogprobsBuilder:
    """Formats one answer's log probabilities, chunk by chunk; remembers the text offset.

    Offsets count characters of the answer's text, however its tokens are spelled: a token that is a
    part of a character stands where that character does.

    Args:
        num_top: Most likely tokens per position; -1: all.
        as_ids: Whether tokens are spelled by their ids.
    """

    def __init__(self, num_top: int, as_ids: bool) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(
        self, token_ids: Sequence[int], rows: SampleLogprobs | PromptLogprobs
    ) -> CompletionLogprobs:
        """Return the next chunk.

        Args:
            token_ids: Its tokens.
            rows: As many entries; None where a token has no probability.
        """
        body = CompletionLogprobs([], [], [], [])
        for token_id, entries in zip(token_ids, rows, strict=False):
            if entries is None:
                text = f"token_id:{token_id}" if self._as_ids else ""
                num_chars = 0
                body.token_logprobs.append(None)
                body.top_logprobs.append(None)
            else:
                own = entries[token_id]
                text = token_text(token_id, own, self._as_ids)
                num_chars = len(self._decoder.decode(bytes(token_bytes(own))))
                body.token_logprobs.append(max(own.logprob, _FLOOR))
                body.top_logprobs.append(self._top(token_id, entries))
            body.tokens.append(text)
            body.text_offset.append(self._offset)
            self._offset += num_chars
        return body

    def _top(self, token_id: int, entries: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the sampled one in any case."""
        best = _most_likely(entries, self._num_top)
        if all(other != token_id for other, _ in best):
            best.append((token_id, entries[token_id]))
        top: dict[str, float] = {}
        for other, entry in best:
            # Two tokens may be spelled alike: the likelier one stays.
            top.setdefault(token_text(other, entry, self._as_ids), max(entry.logprob, _FLOOR))
        return top


def chat_logprobs(
    token_ids: Sequence[int], rows: SampleLogprobs, num_top: int, as_ids: bool
) -> ChatLogprobs:
    """Format log probabilities in the chat dialect.

    Args:
        token_ids: The sampled tokens.
        rows: As many entries.
        num_top: Most likely tokens per position; -1: all.
        as_ids: Whether tokens are spelled by their ids.
    """
    content: list[ChatTokenLogprob] = []
    for token_id, entries in zip(token_ids, rows, strict=False):
        own = entries[token_id]
        top = [
            ChatTopLogprob(
                token_text(other, entry, as_ids), max(entry.logprob, _FLOOR), token_bytes(entry)
            )
            for other, entry in _most_likely(entries, num_top)
        ]
        text = token_text(token_id, own, as_ids)
        content.append(ChatTokenLogprob(text, max(own.logprob, _FLOOR), token_bytes(own), top))
    return ChatLogprobs(content)


def prompt_logprobs_json(rows: PromptLogprobs | None) -> PromptLogprobsJson | None:
    """Format prompt log probabilities: token id to its logprob, rank and text, per position."""
    if rows is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": max(entry.logprob, _FLOOR),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in rows
    ]
