"""The pictures of a chat: read before it is rendered, as its prompt depends on their sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.given_images import check_roles, move_results, take_pictures
from vllm.entrypoints.openai.context import ServingContext
from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import ReadImage
from vllm.tokenizers.chat_messages import ChatImages
from vllm.v1.engine.tenant_limits import current_tenant

_OF_TEXTS = ImageInput(why_none="vectors and scores are made of texts")


@dataclass(frozen=True, slots=True)
class ShownChat:
    """A chat whose pictures were read.

    Attributes:
        messages: With references in place of pictures.
        images: The pictures, as the chat's encoder needs to know them; None: it has none.
        read: The pictures themselves.
    """

    messages: Sequence[Mapping[str, Any]]
    images: ChatImages | None = None
    read: Sequence[ReadImage] = ()


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
    pictures = take_pictures(messages)
    if not pictures.given:
        return ShownChat(messages)
    (context.images if are_taken else _OF_TEXTS).check(pictures.given)
    family = context.images.family
    assert family is not None, "pictures are checked"
    roles = context.chat_encoder.image_roles(family.text.marker)
    if moves_results:
        pictures = move_results(pictures, roles)
    check_roles(pictures, roles)
    read = await context.images.read(pictures.given, settings, scope_of(cache_salt))
    counts = [image.size.num_tokens for image in read]
    images = ChatImages(family.text, family.placeholder_id, counts)
    return ShownChat(pictures.refer(read), images, read)


def scope_of(cache_salt: str | None) -> str:
    """Return who may share what is remembered of pictures: a tenant, and a salt within it."""
    return repr((current_tenant.get(), cache_salt))
