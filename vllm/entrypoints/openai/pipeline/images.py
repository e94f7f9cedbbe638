"""The pictures of a chat: read before it is rendered, as its prompt depends on their sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.openai.context import ServingContext
from vllm.multimodal.image_input import ImageInput
from vllm.v1.engine.image_prompts import scope_of
from vllm.v1.engine.shown_chats import ShownChat, find_pictures, show

_OF_TEXTS = ImageInput(why_none="vectors and scores are made of texts")


async def read_pictures(
    messages: Sequence[Mapping[str, Any]],
    context: ServingContext,
    settings: Mapping[str, Any] | None,
    cache_salt: str | None,
    *,
    moves_results: bool = False,
    are_taken: bool = True,
) -> ShownChat:
    """Return a chat with its pictures read, in threads.

    Args:
        messages: In the chat dialect.
        context: The server's.
        settings: The request's ``mm_processor_kwargs``.
        cache_salt: The request's.
        moves_results: Whether pictures in results of calls may go into a question behind them,
            where the model's format shows none there.
        are_taken: Whether there may be any.

    Raises:
        UserInputError: A picture is wrong, there are too many, or the model is shown none.
    """
    images = context.images if are_taken else _OF_TEXTS
    pictures = find_pictures(messages, images, context.chat_encoder, moves_results=moves_results)
    if not pictures.given:
        return ShownChat(messages)
    read = await images.read(pictures.given, settings, scope_of(cache_salt))
    return show(pictures, read, images)
