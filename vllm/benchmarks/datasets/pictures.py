"""Chats with pictures from a seed, some of which come back: ``--dataset-name random-mm``."""

import ast
import base64
import io
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.draws import Draws
from vllm.exceptions import ConfigError

_PICTURES = 7
# Squares of one colour, with noise: a file of a photo's size, not of a page's.
_SQUARE, _NOISE = 16, 6
# Of those sent last, one of which a picture may repeat.
_MAX_POOL = 64


@dataclass(frozen=True, slots=True)
class PictureShape:
    """What the pictures of a run are like.

    Attributes:
        num_base: Of a request, before it varies.
        range_ratio: Numbers are drawn from [(1 - r) num, (1 + r) num].
        limit: Most of a request.
        buckets: Shares of sizes, (height, width).
        repeat_rate: Share of pictures that were sent before.
    """

    num_base: int = 1
    range_ratio: float = 0.0
    limit: int = 255
    buckets: Mapping[tuple[int, int], float] = field(
        default_factory=lambda: {(256, 256): 0.5, (720, 1280): 0.5}
    )
    repeat_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("range-ratio", self.range_ratio), ("repeat-rate", self.repeat_rate)):
            if not 0 <= share <= 1:
                raise ConfigError(f"--random-mm {name} {share} must be from 0 to 1.")
        if self.num_base < 0 or self.limit < 0:
            raise ConfigError("--random-mm counts of pictures must be at least 0.")


def read_buckets(text: str) -> dict[tuple[int, int], float]:
    """Read ``{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}``: (height, width, frames) and its share.

    Raises:
        ConfigError: It is malformed, or asks for videos.
    """
    refusal = (
        f"--random-mm-bucket-config {text!r} must be such as {{(256, 256, 1): 0.5, (720, 1280, 1): "
        "0.5}: (height, width, frames) and a share above 0; pictures have one frame."
    )
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigError(refusal) from error
    buckets: dict[tuple[int, int], float] = {}
    for size, share in given.items() if isinstance(given, dict) else ():
        is_size = isinstance(size, tuple) and len(size) == 3
        if not is_size or not all(type(number) is int and number > 0 for number in size):
            raise ConfigError(refusal)
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise ConfigError(refusal)
        if share and size[2] != 1:
            raise ConfigError(refusal)
        if share:
            buckets[size[0], size[1]] = float(share)
    if not buckets:
        raise ConfigError(refusal)
    return buckets


def read_limit(text: str) -> int:
    """Read ``{"image": 3}`` or a number.

    Raises:
        ConfigError: It is neither.
    """
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"--random-mm-limit-mm-per-prompt {text!r} is no limit.") from error
    limit = given.get("image", 0) if isinstance(given, dict) else given
    if type(limit) is not int or limit < 0:
        raise ConfigError(f"--random-mm-limit-mm-per-prompt {text!r} is no limit.")
    return limit


def with_pictures(
    requests: list[BenchRequest], shape: PictureShape, seed: int
) -> list[BenchRequest]:
    """Return chats whose one question holds pictures, then the request's text.

    Args:
        requests: Their texts.
        shape: Of the pictures.
        seed: Of all draws.
    """
    draws = Draws(seed, _PICTURES)
    sent: list[str] = []
    made = []
    for request in requests:
        parts = [_part(_draw(draws, shape, sent)) for _ in range(_count(draws, shape))]
        content = [*parts, {"type": "text", "text": request.prompt}]
        made.append(
            BenchRequest(
                request.prompt,
                request.num_prompt_tokens,
                request.num_output_tokens,
                messages=({"role": "user", "content": content},),
            )
        )
    return made


def _count(draws: Draws, shape: PictureShape) -> int:
    low = math.floor(shape.num_base * (1 - shape.range_ratio))
    high = math.ceil(shape.num_base * (1 + shape.range_ratio))
    return draws.between(min(low, shape.limit), min(high, shape.limit))


def _draw(draws: Draws, shape: PictureShape, sent: list[str]) -> str:
    """A picture's address, new or sent before; mutates: sent."""
    if sent and draws.uniform() < shape.repeat_rate:
        return draws.choice(sent)
    sizes, shares = list(shape.buckets), list(shape.buckets.values())
    place = draws.uniform() * sum(shares)
    ends = itertools.accumulate(shares)
    chosen = next((i for i, end in enumerate(ends) if place < end), len(sizes) - 1)
    url = _make(draws.below(1 << 31), *sizes[chosen])
    sent.append(url)
    del sent[:-_MAX_POOL]
    return url


def _make(seed: int, height: int, width: int) -> str:
    # The optional library of pictures: only this dataset needs it.
    from PIL import Image  # noqa: PLC0415

    generator = np.random.default_rng(seed)
    squares = generator.integers(0, 256, (height // _SQUARE + 1, width // _SQUARE + 1, 3))
    pixels = squares.repeat(_SQUARE, 0).repeat(_SQUARE, 1)[:height, :width]
    pixels = pixels + generator.integers(-_NOISE, _NOISE + 1, (height, width, 1))
    out = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
