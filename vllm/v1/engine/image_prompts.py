"""Pictures of prompts that are no chats: texts or token ids with a marker for each picture.

    {"prompt": "<|vision_start|><|image_pad|><|vision_end|>What is this?",
     "multi_modal_data": {"image": picture}, "multi_modal_uuids": {"image": ["a"]},
     "mm_processor_kwargs": {"max_pixels": 400000}}

A marker becomes as many soft tokens as its picture has. Token ids may have the marker's id once for
each picture, or the soft tokens already, each picture's in one run of the right length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from vllm.exceptions import UnsupportedFeatureError, UserInputError
from vllm.inputs import PromptType
from vllm.multimodal.families import ImageFamily
from vllm.multimodal.inputs import ImageFeature
from vllm.multimodal.reader import GivenImage, ReadImage
from vllm.tokenizers import Tokenizer
from vllm.tokenizers.given_images import read_image_part
from vllm.tokenizers.image_markers import expand_markers, find_offsets
from vllm.v1.engine.tenant_limits import current_tenant

_FIELD = "multi_modal_data"
_IMAGE = "image"
# Fields of a prompt that are about its pictures.
_FIELDS = (_FIELD, "multi_modal_uuids", "mm_processor_kwargs")


@dataclass(frozen=True, slots=True)
class SeeingPrompt:
    """A program's prompt whose pictures are not read yet.

    Attributes:
        fields: The prompt without them.
        given: The pictures.
        settings: Its ``mm_processor_kwargs``.
    """

    fields: Mapping[str, Any]
    given: Sequence[GivenImage]
    settings: Mapping[str, Any] | None

    @classmethod
    def find(cls, prompt: PromptType) -> "SeeingPrompt | None":
        """Return a prompt as one with pictures; None: nothing in it is about any.

        Raises:
            UserInputError: What is about pictures is malformed.
            UnsupportedFeatureError: There are other media.
        """
        if not isinstance(prompt, Mapping) or all(prompt.get(name) is None for name in _FIELDS):
            return None
        fields: dict[str, Any] = dict(prompt)
        data, uuids, settings = (fields.pop(name, None) for name in _FIELDS)
        return cls(fields, read_prompt_images(data, uuids, from_program=True), settings)

    def with_images(
        self, read: Sequence[ReadImage], family: ImageFamily | None, tokenizer: Tokenizer | None
    ) -> PromptType:
        """Return the prompt with its pictures in their places.

        Raises:
            UserInputError: Its markers are not those of the pictures, or there is no tokenizer.
        """
        if family is None or not read:
            return cast(PromptType, self.fields)
        if tokenizer is None:
            raise UserInputError(
                "Pictures need a tokenizer, and the engine was built with skip_tokenizer_init.",
                _FIELD,
            )
        ids = self.fields.get("prompt_token_ids")
        prompt = self.fields.get("prompt") if ids is None else ids
        if prompt is None:
            raise UserInputError(
                "The prompt object has neither prompt nor prompt_token_ids: give one.", "prompt"
            )
        token_ids, images = place_images(prompt, read, family, tokenizer)
        return cast(PromptType, {**self.fields, "prompt_token_ids": token_ids, "images": images})


def read_prompt_images(
    data: Any, uuids: Any = None, *, from_program: bool = False
) -> list[GivenImage]:
    """Return the pictures that ``multi_modal_data`` names.

    Args:
        data: ``{"image": picture, or a list of them}``.
        uuids: ``{"image": a name, or a list of names}``.
        from_program: Whether PIL images and arrays are taken.

    Raises:
        UserInputError: It is malformed.
        UnsupportedFeatureError: It holds other media.
    """
    images = _entries(data, _FIELD)
    names = _entries(uuids, "multi_modal_uuids")
    if names and len(names) != len(images):
        raise UserInputError(
            f"multi_modal_uuids has {len(names)} names for {len(images)} pictures: give one each, "
            "or null.",
            "multi_modal_uuids",
        )
    named = names or [None] * len(images)
    given: list[GivenImage] = []
    for i, (image, uuid) in enumerate(zip(images, named, strict=True)):
        part = {"type": "image_url", "image_url": image, "uuid": uuid}
        given.append(
            read_image_part(f"{_FIELD}.image[{i}]", part, _FIELD, from_program=from_program)
        )
    return given


def _entries(value: Any, field: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise UserInputError(f'{field} must be an object such as {{"image": ...}}.', field)
    for name, media in value.items():
        # Arrays are neither true nor false.
        is_empty = isinstance(media, list | tuple | str | dict) and not media
        asks_nothing = media is None or media is False or is_empty
        if name != _IMAGE and not asks_nothing:
            raise UnsupportedFeatureError(
                f"{field}.{str(name)[:40]} is not served: only pictures (image) are.", field
            )
    found = value.get(_IMAGE)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def scope_of(cache_salt: str | None) -> str:
    """Return who may share what is remembered of pictures: a tenant, and a salt within it."""
    return repr((current_tenant.get(), cache_salt))


def place_images(
    prompt: str | Sequence[int],
    read: Sequence[ReadImage],
    family: ImageFamily,
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = True,
) -> tuple[list[int], tuple[ImageFeature, ...]]:
    """Return a prompt's tokens with its pictures' soft tokens, and where those stand.

    Args:
        prompt: A text, or token ids.
        read: The pictures, in their order.
        family: How the model sees them.
        tokenizer: The model's.
        add_special_tokens: Whether to put around a text what the checkpoint does.

    Raises:
        UserInputError: The prompt's markers are not those of the pictures.
    """
    counts = [image.size.num_tokens for image in read]
    if isinstance(prompt, str):
        # Runs that are expanded already have no marker, or as many as they have soft tokens.
        if prompt.count(family.text.marker) != sum(counts) or sum(counts) == len(counts):
            prompt = expand_markers(prompt, family.text, counts, is_of_chat=False)
        token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        token_ids = _expand_ids(list(prompt), counts, family, tokenizer)
    offsets = find_offsets(token_ids, family.placeholder_id, counts)
    return token_ids, tuple(image.at(at) for image, at in zip(read, offsets, strict=True))


def _expand_ids(
    token_ids: list[int], counts: Sequence[int], family: ImageFamily, tokenizer: Tokenizer
) -> list[int]:
    """Put soft tokens in the places of markers; runs that are there already stay."""
    marker = tokenizer.token_to_id(family.text.marker)
    is_expanded = token_ids.count(family.placeholder_id) == sum(counts) != len(counts)
    if is_expanded or marker is None or token_ids.count(marker) != len(counts):
        return token_ids
    expanded: list[int] = []
    remaining = iter(counts)
    for token_id in token_ids:
        if token_id != marker:
            expanded.append(token_id)
            continue
        text = family.text.expand(next(remaining))
        expanded += tokenizer.encode(text, add_special_tokens=False)
    return expanded
