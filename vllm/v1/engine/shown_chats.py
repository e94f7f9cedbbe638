"""Chats with pictures, on their way to a prompt: found and checked, read, referred to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.multimodal.image_input import ImageInput
from vllm.multimodal.reader import ReadImage
from vllm.tokenizers import ChatEncoder
from vllm.tokenizers.chat_messages import ChatImages
from vllm.tokenizers.given_images import ChatPictures, check_roles, move_results, take_pictures


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


def find_pictures(
    messages: Sequence[Mapping[str, Any]],
    images: ImageInput,
    encoder: ChatEncoder,
    *,
    moves_results: bool = False,
    from_program: bool = False,
) -> ChatPictures:
    """Return a chat's pictures, which stand where its format shows them.

    Args:
        messages: In the chat dialect.
        images: What they go through.
        encoder: Of the chat.
        moves_results: Whether pictures in results of calls may go into a question behind them,
            where the model's format shows none there.
        from_program: Whether PIL images are taken.

    Raises:
        UserInputError: One is malformed, there are too many, or the format would drop one.
        UnsupportedFeatureError: The model is shown none.
    """
    pictures = take_pictures(messages, from_program=from_program)
    images.check(pictures.given)
    if not pictures.given or images.family is None:
        return pictures
    roles = encoder.image_roles(images.family.text.marker)
    if moves_results:
        pictures = move_results(pictures, roles)
    check_roles(pictures, roles)
    return pictures


def show(pictures: ChatPictures, read: Sequence[ReadImage], images: ImageInput) -> ShownChat:
    """Return a chat with its pictures, now that they are read."""
    if images.family is None or not read:
        return ShownChat(pictures.messages)
    family, counts = images.family, [image.size.num_tokens for image in read]
    known = ChatImages(family.text, family.placeholder_id, counts)
    return ShownChat(pictures.refer(read), known, read)
