"""Prompts as they are compared: two pictures of one size have equal token ids, and are not equal.

ids          5  9  P  P  P  7          P: a soft token, the same for every picture
comparable   5  9  a  a  a  7          a: 62 bits of the picture's identity, above every token id
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from vllm.multimodal.inputs import ImageFeature, MultiModalFeatureSpec

# Above every token id, and within 63 bits.
_BASE = 1 << 62
_HEX_DIGITS = 15


def comparable_ids(token_ids: Sequence[int], images: Sequence[ImageFeature]) -> Sequence[int]:
    """Return a prompt's ids with what stands for its pictures; the ids themselves without any.

    Args:
        token_ids: Of the prompt, or of its beginning.
        images: Its pictures, in their order.
    """
    if not images:
        return token_ids
    compared = list(token_ids)
    for image in images:
        end = min(image.end, len(compared))
        word = _BASE | int(image.identifier[:_HEX_DIGITS], 16)
        compared[image.offset : end] = [word] * max(end - image.offset, 0)
    return compared


# Above every token id, and within the 31 bits that tables on a disk have for a token.
_FOLLOWER_BASE, _FOLLOWER_BITS = 1 << 30, (1 << 30) - 1


class FollowingTokens(Sequence[int]):
    """A sequence's tokens, by which a drafter's rows are told apart: one of a picture is its own.

    A drafter makes its row from the next token. Where that is a picture's first soft token, another
    picture makes another row from an equal id.

    Args:
        token_ids: Of the sequence; may grow.
        mm_features: Its pictures.
    """

    def __init__(
        self, token_ids: Sequence[int], mm_features: Sequence[MultiModalFeatureSpec]
    ) -> None:
        self._token_ids = token_ids
        self._features = mm_features

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        for feature in self._features:
            place = feature.mm_position
            if place.offset <= index < place.offset + place.length:
                digest = blake2b(feature.identifier.encode(), digest_size=4).digest()
                return _FOLLOWER_BASE | (int.from_bytes(digest, "little") & _FOLLOWER_BITS)
        return self._token_ids[index]
