"""Checked messages whose special tokens are marked, on their way through rendering."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm.tokenizers.chat_messages import ChatMessage
from vllm.tokenizers.literal_text import LiteralText
from vllm.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GuardedMessages:
    """Messages to render.

    Attributes:
        messages: Their special tokens marked.
        mark: The mark; None where there is none.
        literal_text: What marked them; None: special tokens in messages become special.
    """

    messages: Sequence[ChatMessage]
    mark: str | None
    literal_text: LiteralText | None

    def encode(
        self, tokenizer: Tokenizer, rendered: str, add_special_tokens: bool
    ) -> tuple[str, list[int]]:
        """Return the rendered text without marks, and its tokens.

        Raises:
            UserInputError: The text cannot be tokenised.
        """
        if self.literal_text is None or self.mark is None:
            return rendered, tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        token_ids = self.literal_text.encode(rendered, self.mark, add_special_tokens)
        return rendered.replace(self.mark, ""), token_ids


def guard_messages(
    literal_text: LiteralText | None, messages: Sequence[ChatMessage]
) -> GuardedMessages:
    """Mark the special tokens in what clients wrote; without ``literal_text`` nothing is marked."""
    if literal_text is None:
        return GuardedMessages(messages, None, None)
    texts = [text for message in messages for text in (message.content, message.reasoning)]
    mark = literal_text.find_mark(texts)
    if mark is None:
        return GuardedMessages(messages, None, literal_text)
    guarded = [
        replace(
            message,
            content=literal_text.guard(message.content, mark),
            reasoning=literal_text.guard(message.reasoning, mark),
        )
        for message in messages
    ]
    return GuardedMessages(guarded, mark, literal_text)
