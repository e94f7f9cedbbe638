"""Pictures of a run: their number, sizes and repeats are those that its flags say."""

import base64
import io
from typing import Any

import pytest
from PIL import Image

from vllm.benchmarks.datasets.pictures import (
    PictureShape,
    read_buckets,
    read_limit,
    with_pictures,
)
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.exceptions import ConfigError

_TEXTS = [BenchRequest(f"text {i}", 2, 3) for i in range(40)]
_SMALL = {(32, 48): 3.0, (64, 16): 1.0}


def _urls(made: list[BenchRequest]) -> list[list[str]]:
    assert all(request.messages is not None for request in made)
    contents: list[Any] = [request.messages[0]["content"] for request in made if request.messages]
    return [[part["image_url"]["url"] for part in parts[:-1]] for parts in contents]


def _size(url: str) -> tuple[int, int]:
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    return image.height, image.width


def test_numbers_and_sizes_are_those_of_the_shape() -> None:
    shape = PictureShape(2, 0.5, 3, _SMALL)
    made = with_pictures(_TEXTS, shape, 0)
    urls = _urls(made)

    assert {len(own) for own in urls} == {1, 2, 3}
    flat = [url for own in urls for url in own]
    assert len(set(flat)) == len(flat)
    sizes = [_size(url) for url in flat]
    assert set(sizes) == set(_SMALL)
    assert 0.5 < sizes.count((32, 48)) / len(sizes) < 0.95
    assert made == with_pictures(_TEXTS, shape, 0)
    assert made[0].messages is not None
    assert made[0].messages[0]["content"][-1] == {"type": "text", "text": "text 0"}
    assert [
        len(own) for own in _urls(with_pictures(_TEXTS, PictureShape(2, 0.0, 1, _SMALL), 0))
    ] == [1] * 40


def test_as_many_pictures_come_back_as_were_asked_for() -> None:
    made = _urls(with_pictures(_TEXTS * 5, PictureShape(1, 0.0, 9, _SMALL, 0.6), 1))
    flat = [url for own in made for url in own]

    assert 0.5 < 1 - len(set(flat)) / len(flat) < 0.7
    assert len(set(_urls(with_pictures(_TEXTS, PictureShape(1, 0, 9, _SMALL, 1.0), 1))[0])) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", "{(1, 2): 1}", "{(0, 1, 1): 1}", "{(8, 8, 16): 1}", "[1]", "{(8, 8, 1): -1}", "x("],
)
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="bucket-config"):
        read_buckets(text)


def test_what_flags_say_is_read() -> None:
    told = read_buckets("{(256, 512, 1): 0.5, (720, 1280, 16): 0, (8, 8, 1): 2}")

    assert told == {(256, 512): 0.5, (8, 8): 2.0}
    assert (read_limit('{"image": 3, "video": 1}'), read_limit("4")) == (3, 4)
    for wrong in ("many", '{"image": -1}', "[1]"):
        with pytest.raises(ConfigError):
            read_limit(wrong)
    with pytest.raises(ConfigError):
        PictureShape(range_ratio=1.5)
