"""Files become pixels by one rule; broken, huge and foreign ones are refused."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.entrypoints.image_fixtures import png_header
from vllm.exceptions import UserInputError
from vllm.multimodal.decode import DecodeRules, decode_image, pixels_of

_RULES = DecodeRules()


def _picture(width: int = 6, height: int = 4) -> Any:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def _file(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_equal_pixels_come_out_of_every_lossless_format(kind: str) -> None:
    assert (decode_image(_file(_picture(), kind), _RULES) == _picture()).all()


def test_webp_and_gif_are_read() -> None:
    assert (decode_image(_file(_picture(), "WEBP", lossless=True), _RULES) == _picture()).all()
    assert decode_image(_file(_picture(), "GIF"), _RULES).shape == (4, 6, 3)


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_is_turned_as_its_camera_was_held(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    turns: dict[int, Callable[[Any], Any]] = {
        1: lambda p: p,
        2: lambda p: p[:, ::-1],
        3: lambda p: p[::-1, ::-1],
        4: lambda p: p[::-1],
        5: lambda p: p.transpose(1, 0, 2),
        6: lambda p: np.rot90(p, -1),
        7: lambda p: np.rot90(p.transpose(1, 0, 2), 2),
        8: lambda p: np.rot90(p),
    }

    read = decode_image(_file(_picture(), exif=exif), _RULES)

    assert (read == turns[turn](_picture())).all()


def test_transparent_parts_show_the_background_and_hidden_colours_do_not() -> None:
    layer = np.zeros((2, 2, 4), np.uint8)
    layer[..., 0] = 200
    layer[0, 0, 3] = 255

    on_white = decode_image(_file(layer), _RULES)
    on_black = decode_image(_file(layer), DecodeRules(background=(0, 0, 0)))

    assert on_white.tolist() == [[[200, 0, 0], [255] * 3], [[255] * 3] * 2]
    assert on_black.tolist() == [[[200, 0, 0], [0] * 3], [[0] * 3] * 2]


def test_every_mode_becomes_rgb_of_eight_bits() -> None:
    grey = np.array([[0, 128, 255]], np.uint8)
    same = [[[0] * 3, [128] * 3, [255] * 3]]
    for mode in ("L", "P", "RGB", "CMYK", "LA", "RGBA"):
        image = Image.fromarray(grey).convert(mode)
        kind = "TIFF" if mode == "CMYK" else "PNG"
        assert decode_image(_file(image, kind), _RULES).tolist() == same
    # What would be clipped above 8 bits is scaled.
    wide = Image.fromarray(np.array([[0, 32_896, 65_535]], np.uint16))
    assert decode_image(_file(wide), _RULES).tolist() == same
    palette = Image.fromarray(grey).convert("P")
    transparent = decode_image(_file(palette, transparency=128), _RULES)
    assert transparent.shape == (1, 3, 3)
    assert decode_image(_file(Image.new("1", (2, 1), 1)), _RULES).tolist() == [[[255] * 3] * 2]


def test_floating_point_is_refused() -> None:
    with pytest.raises(UserInputError, match="floating-point"):
        decode_image(_file(Image.new("F", (2, 2)), "TIFF"), _RULES)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_many_frames_the_first_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), (v, v, v)) for v in (250, 0, 0)]
    file = _file(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)

    assert np.abs(decode_image(file, _RULES).astype(int) - 250).max() <= 1


@pytest.mark.parametrize(
    "size", [(30_000, 30_000), (9_000, 9_000), (1, 40_000_001), (2**31 - 1, 2)]
)
def test_a_bomb_is_refused_from_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(UserInputError, match="40000000"):
        decode_image(png_header(*size), _RULES)


def test_a_picture_of_a_thousand_scans_is_refused() -> None:
    jpeg = _file(_picture(64, 64), "JPEG", progressive=True)
    at = jpeg.rindex(b"\xff\xda")
    scan = jpeg[at:-2]

    with pytest.raises(UserInputError, match="scans"):
        decode_image(jpeg[:-2] + scan * 1000 + jpeg[-2:], _RULES)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"8BPS\0\1" + b"\0" * 40,
        b"P6 2 2 255 " + b"\0" * 12,
        b"\x89PNG\r\n\x1a\n",
        png_header(20, 20),
        png_header(0, 20),
    ],
)
def test_what_is_no_whole_picture_of_a_known_format_is_refused(data: bytes) -> None:
    with pytest.raises(UserInputError):
        decode_image(data, _RULES)


def test_damaged_files_give_pixels_or_a_refusal() -> None:
    draws = np.random.default_rng(1)
    files = [
        _file(_picture(40, 30), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    ]
    refused = 0
    for number in range(300):
        data = bytearray(files[number % len(files)])
        for place in draws.integers(0, len(data), 1 + number % 20):
            data[place] = draws.integers(256)
        del data[len(data) - int(draws.integers(0, 1 + number % 90)) :]
        try:
            read = decode_image(bytes(data), _RULES)
        except UserInputError:
            refused += 1
        else:
            assert read.dtype == np.uint8
            assert read.shape[2] == 3
    assert 100 < refused < 300


def test_programs_give_pictures_and_arrays() -> None:
    pixels = _picture()

    assert (pixels_of(pixels, _RULES) == pixels).all()
    assert (pixels_of(Image.fromarray(pixels), _RULES) == pixels).all()
    assert pixels_of(pixels[:, :, 0], _RULES).shape == pixels.shape
    for wrong in (pixels.astype(np.float32), pixels[:0], "file.png", pixels[None]):
        with pytest.raises(UserInputError):
            pixels_of(wrong, _RULES)
