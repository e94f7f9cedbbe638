"""From a file's bytes to pixels: one rule for all models.

    bytes -> format, by its first bytes alone -> size, from the header -> first frame -> turned as
    its camera was held (EXIF) -> transparent parts laid on a colour -> RGB, 8 bits

What a client says of the format is not asked. Nothing is decoded before its header is within
limits: a file of 100 KB can claim a billion pixels.

Pillow is imported with the first picture: servers that see none do not wait for it.
"""

from __future__ import annotations

import io
import struct
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.exceptions import UserInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from vllm.multimodal.families import ImageSize, Resample

    Pixels = NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# The largest sensors of phones have 12 to 50 million; most pictures are taken with a quarter.
MAX_PIXELS = 40_000_000
MAX_FILE_BYTES = 20 * 1024**2
WHITE = (255, 255, 255)
# Of these, Pillow would clip what is above 8 bits: they are scaled instead.
_WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MOST_16_BITS = 65_535
# A start of scan; among a picture's own data 0xFF is never followed by this.
_SCAN = b"\xff\xda"
_MAX_SCANS = 200
_JPEGS = ("JPEG", "MPO")
# What Pillow's readers raise for files that are broken, in whatever way.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    EOFError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """How files become pixels.

    Attributes:
        max_pixels: Larger pictures are refused.
        background: Colour behind transparent parts.
    """

    max_pixels: int = MAX_PIXELS
    background: tuple[int, int, int] = WHITE


def decode_image(data: bytes, rules: DecodeRules) -> Pixels:
    """Return the pixels of a file's first frame, uint8 ``[height, width, 3]``.

    Raises:
        UserInputError: It is no picture, of a format that is not read, broken or too large.
    """
    pillow, _ = _pillow()
    if not data:
        raise UserInputError("is empty", "messages")
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise _too_large("", rules) from error
    except pillow.UnidentifiedImageError as error:
        raise UserInputError(
            f"is no picture of a format that is read: use {', '.join(FORMATS)}", "messages"
        ) from error
    except _BROKEN as error:
        raise _broken(error) from error
    with image:
        # Each scan of a progressive picture is a pass over all its pixels, and takes some bytes.
        if image.format in _JPEGS and data.count(_SCAN) > _MAX_SCANS:
            raise UserInputError(
                f"has more than {_MAX_SCANS} scans, which cameras and programs do not make: save "
                "it anew",
                "messages",
            )
        return _read(image, rules)


def pixels_of(image: Any, rules: DecodeRules) -> Pixels:
    """Return the pixels of a picture that a program holds: a PIL image, or an array.

    Args:
        image: PIL, or uint8 ``[height, width]`` or ``[height, width, 1, 3 or 4]``.
        rules: As for files.

    Raises:
        UserInputError: It is neither, or too large.
    """
    pillow, _ = _pillow()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
            raise UserInputError(
                "is an array that is no picture: give uint8 of shape [height, width, 3]",
                "multi_modal_data",
            )
        flat = image[:, :, 0] if image.ndim == 3 and image.shape[2] == 1 else image
        if flat.ndim == 3 and flat.shape[2] not in (3, 4):
            raise UserInputError(
                f"is an array of shape {image.shape}: give [height, width, 3]", "multi_modal_data"
            )
        image = pillow.fromarray(np.ascontiguousarray(flat))
    if not isinstance(image, pillow.Image):
        raise UserInputError(
            f"is a {type(image).__name__}: give a PIL image or a numpy array", "multi_modal_data"
        )
    return _read(image, rules)


def resize(pixels: Pixels, size: ImageSize, resample: Resample) -> Pixels:
    """Return pixels at another size, uint8 ``[size.height, size.width, 3]``, C-contiguous."""
    height, width = pixels.shape[:2]
    if (width, height) == (size.width, size.height):
        return np.ascontiguousarray(pixels)
    pillow, _ = _pillow()
    filters = {"bilinear": pillow.Resampling.BILINEAR, "bicubic": pillow.Resampling.BICUBIC}
    image = pillow.fromarray(pixels)
    return np.array(image.resize((size.width, size.height), filters[resample]))


def _pillow() -> tuple[Any, Any]:
    """Pillow's modules of pictures and of operations on them."""
    from PIL import Image, ImageOps  # noqa: PLC0415

    # It warns of large and of slightly broken files; limits of our own decide.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image, ImageOps


def _read(image: Image.Image, rules: DecodeRules) -> Pixels:
    """The pixels of an opened picture; its header has been read, its data not."""
    pillow, operations = _pillow()
    width, height = image.size
    if width < 1 or height < 1:
        raise UserInputError("has no pixels", "messages")
    if width * height > rules.max_pixels:
        raise _too_large(f"{width} x {height} pixels, ", rules)
    try:
        image.load()
        turned = operations.exif_transpose(image)
        return np.array(_flatten(turned, rules.background, pillow))
    except pillow.DecompressionBombError as error:
        raise _too_large("", rules) from error
    except _BROKEN as error:
        raise _broken(error) from error


def _flatten(image: Image.Image, background: tuple[int, int, int], pillow: Any) -> Image.Image:
    """An RGB picture of one in any mode."""
    if image.mode in _WIDE_MODES:
        wide = np.array(image).astype(np.int64)
        # A 16-bit picture in a mode of 32 bits is one all the same.
        image = pillow.fromarray((np.clip(wide, 0, _MOST_16_BITS) // 257).astype(np.uint8))
    elif image.mode == "F":
        raise UserInputError(
            "holds floating-point numbers, which say nothing of black and white: save it with 8 "
            "bits a channel",
            "messages",
        )
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        ground = pillow.new("RGBA", layer.size, (*background, 255))
        ground.alpha_composite(layer)
        image = ground
    return image.convert("RGB")


def _too_large(size: str, rules: DecodeRules) -> UserInputError:
    most = f"more than the {rules.max_pixels} pixels that are read"
    return UserInputError(f"has {size}{most}: send it smaller", "messages")


def _broken(error: BaseException) -> UserInputError:
    if isinstance(error, UserInputError):
        return error
    return UserInputError(f"cannot be decoded, it is broken or cut off ({error})"[:200], "messages")
