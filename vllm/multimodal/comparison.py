"""Prompts as they are compared: two pictures of one size have equal token ids, and are not equal.

ids          5  9  P  P  P  7          P: a soft token, the same for every picture
comparable   5  9  a  a  a  7          a: 62 bits of the picture's identity, above every token id
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.inputs import ImageFeature

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
