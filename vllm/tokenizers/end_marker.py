"""Where the content of a chat's last message ends in its prompt, for answers that are continued.

A text of our own is put behind the content before the chat is rendered, and the prompt ends where
it stands: looking for the content itself would find its letters in what the template puts behind.

    content    The answer is*
    rendered   <|im_start|>assistant\nThe answer is*<|im_end|>\n
    prompt     <|im_start|>assistant\nThe answer is
"""

import secrets
from dataclasses import replace

from vllm.exceptions import UserInputError
from vllm.tokenizers.chat_messages import ChatMessage


class EndMarker:
    """A text that stands in no message. Templates that trim contents are known by its last space.

    Owns: the text.
    """

    def __init__(self) -> None:
        self._text = f"endofcontent{secrets.token_hex(16)}"

    def put_behind(self, message: ChatMessage) -> ChatMessage:
        """Return the message with the marker behind its content."""
        marker = self._text + " "
        parts = message.parts
        if parts is not None:
            last = parts[-1] if parts else ""
            parts = (*parts[:-1], last + marker) if isinstance(last, str) else (*parts, marker)
        return replace(message, content=message.content + marker, parts=parts)

    def cut(self, rendered: str, message: ChatMessage) -> str:
        """Return a rendered chat up to the end of its last message's content.

        Where the template trims contents, so is this one: that is what answers follow in training.

        Args:
            rendered: The chat with the marker.
            message: The last one, without it.

        Raises:
            UserInputError: The template does not show the content.
        """
        at = rendered.rfind(self._text)
        if at < 0:
            raise UserInputError(
                "continue_final_message: the chat template does not show the last message's "
                "content, so it cannot be continued.",
                "continue_final_message",
            )
        behind = at + len(self._text)
        is_trimmed = rendered[behind : behind + 1] != " "
        content = message.content
        space = content[len(content.rstrip()) :]
        if is_trimmed and content.strip() and rendered[:at].endswith(space):
            at -= len(space)
        return rendered[:at]
