"""What makes two pictures the same to a model: what its tower reads, and nothing else.

    identity = SHA-256 of  "image" | tower | normalisation | rows | columns | height | width | RGB

each field framed by its length. Another file, address or encoding of the same pixels is the same
picture. Another budget, crop or background makes other pixels, so another picture: no list of
settings has to be kept.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vllm.multimodal.families import ImageFamily, ImageSize

_NUM_LENGTH_BYTES = 8


_IDENTITY = re.compile(r"[0-9a-f]{64}")


def is_identity(identifier: str) -> bool:
    """Return whether an item is named by what it holds, as ``image_identity`` names pictures."""
    return _IDENTITY.fullmatch(identifier) is not None


def image_identity(
    pixels: NDArray[np.uint8], size: ImageSize, family: ImageFamily, tower: str
) -> str:
    """Return the identity of a resized picture, 64 hex digits.

    Args:
        pixels: uint8 ``[height, width, 3]``, C-contiguous.
        size: Its size.
        family: Of the model.
        tower: What tells the tower's weights and type from others.
    """
    height, width = pixels.shape[:2]
    numbers = (size.rows, size.columns, height, width)
    fields = ["image", tower, family.name, family.normalisation, *map(str, numbers)]
    digest = hashlib.sha256()
    framed: list[memoryview] = [memoryview(text.encode()) for text in fields]
    for field in (*framed, pixels.data):
        digest.update(field.nbytes.to_bytes(_NUM_LENGTH_BYTES, "little"))
        digest.update(field)
    return digest.hexdigest()
