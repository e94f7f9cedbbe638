"""What a server is told of pictures."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from vllm.config.multimodal import DEFAULT_MAX_IMAGES, MultiModalConfig, parse_limits
from vllm.exceptions import ConfigError


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("image=4", {"image": 4}),
        ("image=4,video=0", {"image": 4, "video": 0}),
        ('{"image": 2}', {"image": 2}),
        ('{"image": {"count": 2, "width": 512}}', {"image": {"count": 2, "width": 512}}),
    ],
)
def test_both_spellings_of_limits_are_read(text: str, limits: Any) -> None:
    assert parse_limits(text) == limits


@pytest.mark.parametrize("text", ["image", "image=many", "[1]", "4", '{"image": ', ""])
def test_other_texts_are_no_limits(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="image=4"):
        parse_limits(text)


def test_how_many_pictures_a_request_may_have() -> None:
    def most(**fields: Any) -> int:
        return MultiModalConfig(**fields).max_images

    assert most() == DEFAULT_MAX_IMAGES
    assert most(limit_mm_per_prompt={"image": 3, "video": 0}) == 3
    assert most(limit_mm_per_prompt={"image": {"count": 2}}) == 2
    assert most(limit_mm_per_prompt={"video": 9}) == DEFAULT_MAX_IMAGES
    assert most(limit_mm_per_prompt={"image": 3}, language_model_only=True) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"image": "2"}},
        {"limit_mm_per_prompt": {"picture": 2}},
        {"media_io_kwargs": {"image": {"colour": 1}}},
        {"media_io_kwargs": {"film": {}}},
        {"media_io_kwargs": {"image": []}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2]}}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 256]}}},
        {"media_io_kwargs": {"image": {"max_pixels": 0}}},
        {"media_io_kwargs": {"image": {"max_pixels": "many"}}},
        {"mm_processor_cache_gb": -1.0},
        {"allowed_local_media_path": "/there/is/no/such/folder"},
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MultiModalConfig(**fields)


def test_settings_are_read(tmp_path: Path) -> None:
    config = MultiModalConfig(
        media_io_kwargs={"image": {"rgba_background_color": [1, 2, 3], "max_pixels": 500}},
        allowed_media_domains=["a.example"],  # type: ignore[arg-type]  # as programs give them
        allowed_local_media_path=str(tmp_path),
        mm_processor_cache_gb=0.5,
    )

    assert config.background == (1, 2, 3)
    assert (config.max_image_pixels, config.memo_bytes) == (500, 1 << 29)
    assert config.allowed_media_domains == ("a.example",)
    assert MultiModalConfig().background == (255, 255, 255)
