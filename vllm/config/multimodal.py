"""What pictures a request may bring, where they may come from and how they are read."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.options import NOT_NEGATIVE, check_options, option
from vllm.exceptions import ConfigError

_GROUP = "images"
DEFAULT_MAX_IMAGES = 16
DEFAULT_ENCODER_DISK_SIZE = "4GiB"
_MODALITIES = ("image", "video", "audio")
_IO_SETTINGS = ("rgba_background_color", "max_pixels")


def parse_limits(text: str) -> dict[str, Any]:
    """Parse ``{"image": 4}``, or ``image=4,video=0``.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    refusal = f'{text!r} must be such as image=4, or a JSON object such as {{"image": 4}}'
    if "=" not in text or text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{refusal}: {error}") from error
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(refusal)
        return value
    limits: dict[str, Any] = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not count.strip().isdigit():
            raise argparse.ArgumentTypeError(refusal)
        limits[name.strip()] = int(count)
    return limits


@dataclass(frozen=True, slots=True)
class MultiModalConfig:
    """Pictures of requests. Frozen: what is resolved is final.

    Raises:
        ConfigError: A value is wrong.
    """

    limit_mm_per_prompt: Mapping[str, Any] = option(
        {},
        f'Pictures that a request may have: {{"image": 4}}, or image=4. 0 refuses pictures. '
        f"Default: {DEFAULT_MAX_IMAGES}.",
        group=_GROUP,
        parse=parse_limits,
        metavar="JSON",
        more="See `docs/images.md`.",
    )
    mm_processor_kwargs: Mapping[str, Any] = option(
        {},
        'Sizes of pictures: {"max_soft_tokens": 560} for Gemma 4, {"max_pixels": 4194304} for '
        "Qwen. A request's go before them.",
        group=_GROUP,
        metavar="JSON",
        more="See `docs/images.md`.",
    )
    media_io_kwargs: Mapping[str, Any] = option(
        {},
        "How files are read: for image, rgba_background_color (a colour behind transparent parts) "
        "and max_pixels.",
        group=_GROUP,
        metavar="JSON",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Hosts from which the server may fetch pictures; '*': any on the public internet. Default: "
        "none, pictures come with their requests.",
        group=_GROUP,
        many=True,
        metavar="HOST",
    )
    allowed_local_media_path: str | None = option(
        None,
        "Folder from which requests may name files (file:///...). Default: none.",
        group=_GROUP,
        metavar="FOLDER",
    )
    language_model_only: bool = option(
        False,
        "Leave the model's eyes out: pictures are refused, and their weights are not there.",
        group=_GROUP,
    )
    mmproj: str | None = option(
        None,
        "GGUF file of the tower for pictures (mmproj-*.gguf), where the model is a GGUF file.",
        group=_GROUP,
        metavar="FILE",
        more="See `docs/images.md`.",
    )
    mm_encoder_cache_dir: str | None = option(
        None,
        "Folder that keeps what towers made of pictures, so that one seen before costs no tower "
        "after a restart. Default: none.",
        group=_GROUP,
        metavar="DIR",
        more="See `docs/images.md`.",
    )
    mm_encoder_cache_disk_size: str = option(
        DEFAULT_ENCODER_DISK_SIZE,
        "What the files of --mm-encoder-cache-dir may take.",
        group=_GROUP,
        metavar="SIZE",
    )
    mm_processor_cache_gb: float = option(
        0.25,
        "GiB of resized pictures that each server process keeps, so that a conversation's older "
        "pictures are not decoded again; 0: none.",
        group=_GROUP,
        limit=NOT_NEGATIVE,
    )

    def __post_init__(self) -> None:
        check_options(self)
        # Programs give lists where the command line gives several values.
        hosts: Any = self.allowed_media_domains
        hosts = (hosts,) if isinstance(hosts, str) else tuple(hosts or ())
        object.__setattr__(self, "allowed_media_domains", hosts)
        self._check_limits()
        self._check_io()
        is_sized = self.mm_encoder_cache_disk_size != DEFAULT_ENCODER_DISK_SIZE
        if is_sized and self.mm_encoder_cache_dir is None:
            raise ConfigError(
                f"mm_encoder_cache_disk_size={self.mm_encoder_cache_disk_size!r} is about a "
                "folder, but there is none: set --mm-encoder-cache-dir."
            )
        folder = self.allowed_local_media_path
        if folder and not Path(folder).is_dir():
            raise ConfigError(f"allowed_local_media_path={folder!r} is no folder.")

    @property
    def max_images(self) -> int:
        """Pictures that a request may have; 0: the model is shown none."""
        limit = self.limit_mm_per_prompt.get("image", DEFAULT_MAX_IMAGES)
        return 0 if self.language_model_only else int(_count(limit))

    def _check_limits(self) -> None:
        for name, value in self.limit_mm_per_prompt.items():
            count = _count(value)
            if name not in _MODALITIES or type(count) is not int or count < 0:
                raise ConfigError(
                    f"limit_mm_per_prompt has {name!r}: {value!r}: give a number of at least 0 for "
                    f"each of {', '.join(_MODALITIES)}."
                )

    def _check_io(self) -> None:
        settings = self._image_io
        unknown = [
            *(name for name in self.media_io_kwargs if name not in _MODALITIES),
            *(f"image.{name}" for name in settings if name not in _IO_SETTINGS),
        ]
        if unknown:
            raise ConfigError(
                f"media_io_kwargs has {', '.join(unknown)}, which mean nothing here: image has "
                f"{' and '.join(_IO_SETTINGS)}."
            )
        colour: Any = settings.get("rgba_background_color") or (255, 255, 255)
        is_colour = isinstance(colour, list | tuple) and len(colour) == 3
        if not is_colour or not all(type(v) is int and 0 <= v <= 255 for v in colour):
            raise ConfigError(
                f"media_io_kwargs.image.rgba_background_color={colour!r} must be three numbers "
                "from 0 to 255."
            )
        most = settings.get("max_pixels")
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(
                f"media_io_kwargs.image.max_pixels={most!r} must be a whole number of at least 1."
            )

    @property
    def _image_io(self) -> Mapping[str, Any]:
        found = self.media_io_kwargs.get("image", {})
        if not isinstance(found, Mapping):
            raise ConfigError("media_io_kwargs.image must be an object.")
        return found

    @property
    def background(self) -> tuple[int, int, int]:
        """Colour behind transparent parts: white, if nothing else is said."""
        red, green, blue = self._image_io.get("rgba_background_color") or (255, 255, 255)
        return red, green, blue

    @property
    def max_image_pixels(self) -> int | None:
        """Pixels of the largest picture that is read; None: the usual limit."""
        found = self._image_io.get("max_pixels")
        return None if found is None else int(found)

    @property
    def memo_bytes(self) -> int:
        """Bytes of resized pictures that a server process keeps."""
        return int(self.mm_processor_cache_gb * 1024**3)


def _count(limit: Any) -> Any:
    """The number of a limit, which vLLM also writes as an object."""
    return limit.get("count") if isinstance(limit, Mapping) else limit
