"""A tokenizer that renders its model's chats, for programs that know transformers' interface."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.tokenizers.chat_messages import ChatEncoder, ChatOptions
from vllm.tokenizers.chat_tools import parse_tools
from vllm.tokenizers.tokenizer import Tokenizer


class ChatTokenizer(Tokenizer):
    """See ``Tokenizer``.

    Args:
        tokenizer: The model's.
        find_encoder: Returns what encodes chats by a template; None: by the model's own.
    """

    def __init__(
        self, tokenizer: Tokenizer, find_encoder: Callable[[str | None], ChatEncoder]
    ) -> None:
        super().__init__(tokenizer.backend, tokenizer.config)
        self._find_encoder = find_encoder

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt of a chat, as the served model's chats are rendered.

        Args:
            conversation: Messages, ``{"role", "content"}``.
            tools: Functions the model may call, as OpenAI's API takes them.
            chat_template: A Jinja template instead of the model's own chat format.
            add_generation_prompt: Whether to open the assistant's turn.
            continue_final_message: Whether to leave the last message open.
            tokenize: Whether to return token ids; else the text.
            **template_kwargs: Further variables of the template.

        Raises:
            UserInputError: A message is wrong, or the model has no chat format.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=parse_tools(tools) if tools else (),
        )
        prompt = self._find_encoder(chat_template).encode_chat(conversation, options)
        return prompt.token_ids if tokenize else prompt.text
