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
from vllm.tokenizers import Tokenizer

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
        tokenizer: Spells the tokens that have no probability.
    """

    def __init__(self, num_top: int, as_ids: bool, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0
        self._hides_first = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add_prompt(
        self, token_ids: Sequence[int], rows: PromptLogprobs, text: str | None
    ) -> CompletionLogprobs:
        """Return the chunk of a prompt that stands in front of its answer.

        Args:
            token_ids: Its tokens.
            rows: As many entries; the first has no probability.
            text: The prompt, if it was given as a text: a token that the checkpoint puts in front
                of it stands in no text, and is spelled so.
        """
        if text is not None and token_ids and token_ids[0] in self._tokenizer.all_special_ids:
            self._hides_first = not text.startswith(self._tokenizer.decode(token_ids[:1]))
        return self.add(token_ids, rows)

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
                text, num_chars = self._spell(token_id)
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

    def _spell(self, token_id: int) -> tuple[str, int]:
        """How a text's first token is spelled, and its characters there."""
        own = b"" if self._hides_first else self._tokenizer.token_bytes(token_id)
        if own and not self._tokenizer.is_byte_level:
            # A text shows no space in front of its first word.
            shown = self._tokenizer.decode([token_id])
            own = shown.encode() if "\ufffd" not in shown else own
        entry = Logprob(logprob=0.0, token_bytes=own)
        return token_text(token_id, entry, self._as_ids), len(self._decoder.decode(own))

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
