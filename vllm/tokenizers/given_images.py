"""Pictures in the messages of chats: found, checked, and taken out before the chat is rendered.

    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}, text]}
    -> {"role": "user", "content": [ImageRef(0), text]}  and  [GivenImage("messages[0]...")]

All spellings are one here: ``image_url`` with an object or a bare text, Responses' ``input_image``,
``image`` as model cards write it, and, from programs, ``image_pil``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.multimodal.families import DETAILS
from vllm.multimodal.reader import GivenImage, ReadImage
from vllm.multimodal.sources import read_url
from vllm.tokenizers.chat_messages import ImageRef

_MAX_UUID_CHARS = 128
_KINDS = ("image_url", "input_image", "image", "image_pil")
# What a part without a type is told by.
_UNTYPED = ("image_url", "image_pil", "image")
_NOT_SERVED = {
    "image_embeds": "embeddings that a client made cannot be checked: send the picture",
    **dict.fromkeys(("video_url", "input_video", "video"), "videos are not read: send frames"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "sound is not heard"),
    **dict.fromkeys(("input_file", "file"), "files are not read: send pictures, or their text"),
}


@dataclass(frozen=True, slots=True)
class ChatPictures:
    """A chat's messages, and the pictures that were taken out of them.

    Attributes:
        messages: With a ``GivenImage`` in place of each picture.
        given: The pictures, in their order.
        roles: Of the messages that they stand in, as the chat dialect has them.
    """

    messages: Sequence[Mapping[str, Any]]
    given: Sequence[GivenImage]
    roles: Sequence[str]

    def refer(self, read: Sequence[ReadImage]) -> list[Mapping[str, Any]]:
        """Return the messages with references to the pictures as they were read."""
        refs = iter(ImageRef(i, image.identifier) for i, image in enumerate(read))
        return [_replace_images(message, refs) for message in self.messages]


def take_pictures(
    messages: Sequence[Mapping[str, Any]], *, from_program: bool = False
) -> ChatPictures:
    """Find the pictures of a chat; messages that have none stay as they are.

    Args:
        messages: In the chat dialect, or with ``GivenImage`` in their contents.
        from_program: Whether PIL images are taken.

    Raises:
        UserInputError: A picture is malformed.
        UnsupportedFeatureError: A part is of a kind that is not served.
    """
    taken: list[Mapping[str, Any]] = []
    given: list[GivenImage] = []
    roles: list[str] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_picture, content)):
            taken.append(message)
            continue
        parts: list[Any] = []
        for j, part in enumerate(content):
            if _is_picture(part):
                where = f"messages[{i}].content[{j}]"
                part = (
                    part
                    if isinstance(part, GivenImage)
                    else read_image_part(where, part, from_program=from_program)
                )
                given.append(part)
                roles.append(str(message.get("role")))
            parts.append(part)
        taken.append({**message, "content": parts})
    return ChatPictures(taken, given, roles)


def move_results(pictures: ChatPictures, roles: frozenset[str]) -> ChatPictures:
    """Return a chat whose calls' results show no pictures, if the model's format has none there.

    They go into a question right behind the results, as the model sees them nowhere else.

    Args:
        pictures: The chat.
        roles: In whose messages the format shows pictures.
    """
    if "tool" in roles or "user" not in roles or "tool" not in pictures.roles:
        return pictures
    messages: list[Mapping[str, Any]] = []
    waiting: list[GivenImage] = []

    def flush() -> None:
        if waiting:
            messages.append({"role": "user", "content": list(waiting)})
            waiting.clear()

    for message in pictures.messages:
        if message.get("role") != "tool":
            flush()
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, list):
            waiting += [part for part in content if isinstance(part, GivenImage)]
            texts = [part for part in content if not isinstance(part, GivenImage)]
            message = {**message, "content": texts or ""}
        messages.append(message)
    flush()
    return ChatPictures(messages, *_list_images(messages))


def check_roles(pictures: ChatPictures, roles: frozenset[str]) -> None:
    """Refuse pictures in messages in which the model's chat format shows none.

    Args:
        pictures: The chat.
        roles: In whose messages it shows them.

    Raises:
        UserInputError: It would drop one.
    """
    for given, role in zip(pictures.given, pictures.roles, strict=True):
        # What clients call a developer is the system.
        if ("system" if role == "developer" else role) not in roles:
            places = ", ".join(sorted(roles)) or "none"
            raise UserInputError(
                f"{given.where} is a picture in a message of role {role!r}, where this model's "
                f"chat format shows none (it does in: {places}): put it into a user's message.",
                "messages",
            )


def _list_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[GivenImage], list[str]]:
    found = [
        (part, str(message.get("role")))
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, GivenImage)
    ]
    return [part for part, _ in found], [role for _, role in found]


def read_image_part(
    where: str, part: Mapping[str, Any], param: str = "messages", *, from_program: bool = False
) -> GivenImage:
    """Return the picture that a part of a content names; its bytes are not looked at.

    Args:
        where: The part's place, for errors.
        part: Of a kind that is a picture's.
        param: The request's field.
        from_program: Whether PIL images are taken.

    Raises:
        UserInputError: It is malformed.
        UnsupportedFeatureError: It is of a kind that is not served.
    """
    kind = part.get("type") or next(name for name in _UNTYPED if name in part)
    if kind in _NOT_SERVED:
        raise UnsupportedFeatureError(f"{where} has type {kind!r}: {_NOT_SERVED[kind]}.", param)
    if part.get("file_id") is not None:
        raise UnsupportedFeatureError(
            f"{where}.file_id names a stored file, and none are stored for pictures: send the "
            "picture itself as image_url (data:image/png;base64,...).",
            param,
        )
    value = next((part[name] for name in (*_UNTYPED, "url") if part.get(name) is not None), None)
    detail = part.get("detail")
    if isinstance(value, Mapping):
        detail = value.get("detail") if value.get("detail") is not None else detail
        value = value.get("url")
    uuid = _read_uuid(where, part.get("uuid"), param)
    given = GivenImage(where, detail=_read_detail(where, detail, param), uuid=uuid)
    if value is None or (isinstance(value, str) and not value):
        if uuid is None:
            raise UserInputError(f"{where} names no picture: give image_url.url.", param)
        return given
    return _with_value(given, value, param, from_program=from_program)


def _with_value(given: GivenImage, value: Any, param: str, *, from_program: bool) -> GivenImage:
    if not isinstance(value, str):
        if not from_program:
            raise UserInputError(
                f"{given.where}: the url of a picture must be a string, not "
                f"{type(value).__name__}.",
                param,
            )
        return GivenImage(given.where, image=value, detail=given.detail)
    try:
        origin = read_url(value)
    except UserInputError as error:
        raise UserInputError(f"{given.where} {error}.", param) from error
    return GivenImage(given.where, origin, detail=given.detail, uuid=given.uuid)


def _read_detail(where: str, detail: Any, param: str) -> str:
    if detail is None:
        return "auto"
    if not isinstance(detail, str) or detail not in DETAILS:
        raise UserInputError(
            f"{where}.detail={str(detail)[:40]!r} is unknown: use {', '.join(DETAILS)}.", param
        )
    return detail


def _read_uuid(where: str, uuid: Any, param: str) -> str | None:
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= _MAX_UUID_CHARS:
        raise UserInputError(
            f"{where}.uuid must be a text of 1 to {_MAX_UUID_CHARS} characters.", param
        )
    return uuid


def _is_picture(part: Any) -> bool:
    if isinstance(part, GivenImage):
        return True
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    if kind is None:
        return any(name in part for name in _UNTYPED)
    return isinstance(kind, str) and (kind in _KINDS or kind in _NOT_SERVED)


def _replace_images(message: Mapping[str, Any], refs: Any) -> Mapping[str, Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(isinstance(p, GivenImage) for p in content):
        return message
    parts = [next(refs) if isinstance(part, GivenImage) else part for part in content]
    return {**message, "content": parts}
