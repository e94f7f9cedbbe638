"""How a family of models sees pictures: the sizes that its tower reads, and their text in a prompt.

A picture is resized to a size that the family's rule chooses; every so many pixels of that are one
*soft token*, a position of the prompt whose embedding comes from the tower:

    family     a picture becomes                        soft tokens       in the prompt
    gemma3     896 x 896, whatever it was               256               (breaks) <boi> s..s <eoi>
    gemma4     as large as a budget of tokens allows    one a 48 x 48     <boi> s..s <eoi>
    qwen3_5    its own size, between two areas          one a 32 x 32     s..s
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from vllm.exceptions import UserInputError

Resample = Literal["bilinear", "bicubic"]
# What a client may say of a picture (``detail``); "auto" and none are the configured size.
DETAILS = ("auto", "low", "high", "original")
# Soft tokens that Gemma 4 was trained with.
GEMMA4_BUDGETS = (70, 140, 280, 560, 1120)
_SETTINGS = "mm_processor_kwargs"
# What some family knows in them.
KNOWN_SETTINGS = frozenset(
    ("do_pan_and_scan", "max_soft_tokens", "min_pixels", "max_pixels", "size")
)
_QWEN_MAX_RATIO = 200
# Soft tokens of a picture of low detail.
_GEMMA4_LOW, _QWEN_LOW = 70, 256
# Of a server without an accelerator, where a tower takes a minute for 2,000 tokens.
QWEN_CPU_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class ImageSize:
    """What a picture is resized to.

    Attributes:
        width: Pixels.
        height: Pixels.
        rows: Soft tokens from top to bottom.
        columns: Soft tokens from left to right.
    """

    width: int
    height: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Soft tokens, which stand in the prompt row by row."""
        return self.rows * self.columns


class SizeRule(Protocol):
    """Chooses the size that a picture is resized to."""

    @property
    def max_tokens(self) -> int:
        """The most soft tokens of one picture, whatever a request asks for."""

    @property
    def resample(self) -> Resample:
        """How pixels are interpolated."""

    def fit(self, width: int, height: int) -> ImageSize:
        """Return the size of a picture of so many pixels, both at least 1.

        Raises:
            UserInputError: It has none.
        """

    def with_settings(self, settings: Mapping[str, Any]) -> SizeRule:
        """Return the rule as ``mm_processor_kwargs`` changes it.

        Raises:
            UserInputError: A setting is unknown, or its value is.
        """

    def with_detail(self, detail: str) -> SizeRule:
        """Return the rule for a picture of one of DETAILS."""

    def for_cpu(self) -> SizeRule:
        """Return the rule of a server without an accelerator."""


@dataclass(frozen=True, slots=True)
class FixedSize:
    """One size for all pictures; their aspect ratio is lost.

    Args:
        side: Pixels of both sides.
        tokens_a_side: Soft tokens of both sides.
    """

    side: int
    tokens_a_side: int
    resample: Resample = "bilinear"

    @property
    def max_tokens(self) -> int:
        """See SizeRule."""
        return self.tokens_a_side**2

    def fit(self, width: int, height: int) -> ImageSize:
        """See SizeRule."""
        return ImageSize(self.side, self.side, self.tokens_a_side, self.tokens_a_side)

    def with_settings(self, settings: Mapping[str, Any]) -> FixedSize:
        """See SizeRule; crops (``do_pan_and_scan``) are not made."""
        rest = dict(settings)
        if rest.pop("do_pan_and_scan", None) not in (None, False):
            raise UserInputError(
                "mm_processor_kwargs.do_pan_and_scan is not served: a picture is read whole, so "
                "leave it out or send the crops as pictures.",
                _SETTINGS,
            )
        _check_known(rest, "do_pan_and_scan (false)")
        return self

    def with_detail(self, detail: str) -> FixedSize:
        """See SizeRule."""
        return self

    def for_cpu(self) -> FixedSize:
        """See SizeRule."""
        return self


@dataclass(frozen=True, slots=True)
class BudgetSize:
    """As large as a number of soft tokens allows, small pictures enlarged.

    Args:
        cell: Pixels of both sides of a soft token: a multiple of the tower's patch.
        budget: The most soft tokens.
        release_budget: That of the release, for pictures of high detail.
        max_cells: Soft tokens of a side for which the tower has positions.
    """

    cell: int
    budget: int
    release_budget: int
    max_cells: int
    resample: Resample = "bicubic"

    @property
    def max_tokens(self) -> int:
        """See SizeRule."""
        return max(*GEMMA4_BUDGETS, self.budget)

    def fit(self, width: int, height: int) -> ImageSize:
        """See SizeRule."""
        cell, budget = self.cell, self.budget
        scale = math.sqrt(budget * cell * cell / (height * width))
        rows = math.floor(scale * height / cell)
        columns = math.floor(scale * width / cell)
        if not rows and not columns:
            raise _too_long(width, height, "has no size that the model reads")
        if not rows:
            rows, columns = 1, min(width // height, budget)
        elif not columns:
            rows, columns = min(height // width, budget), 1
        if max(rows, columns) > self.max_cells:
            most = f"more than the {self.max_cells} soft tokens of a side that the model reads"
            raise _too_long(width, height, f"is {max(rows, columns)} soft tokens long, {most}")
        return ImageSize(columns * cell, rows * cell, rows, columns)

    def with_settings(self, settings: Mapping[str, Any]) -> BudgetSize:
        """See SizeRule."""
        rest = dict(settings)
        budget = rest.pop("max_soft_tokens", None)
        _check_known(rest, "max_soft_tokens")
        if budget is None:
            return self
        if type(budget) is not int or budget not in GEMMA4_BUDGETS:
            raise UserInputError(
                f"mm_processor_kwargs.max_soft_tokens={str(budget)[:40]} is none of "
                f"{', '.join(map(str, GEMMA4_BUDGETS))}.",
                _SETTINGS,
            )
        return replace(self, budget=budget)

    def with_detail(self, detail: str) -> BudgetSize:
        """See SizeRule."""
        if detail == "low":
            return replace(self, budget=min(_GEMMA4_LOW, self.budget))
        if detail in ("high", "original"):
            return replace(self, budget=max(self.release_budget, self.budget))
        return self

    def for_cpu(self) -> BudgetSize:
        """See SizeRule."""
        return self


@dataclass(frozen=True, slots=True)
class AreaSize:
    """A picture's own size, rounded, between two areas.

    Args:
        cell: Pixels of both sides of a soft token.
        min_pixels: Smaller pictures are enlarged to this area.
        max_pixels: Larger pictures are shrunk to this area.
        release_max_pixels: That of the release, for pictures of high detail.
    """

    cell: int
    min_pixels: int
    max_pixels: int
    release_max_pixels: int
    resample: Resample = "bicubic"

    @property
    def max_tokens(self) -> int:
        """See SizeRule."""
        return max(self.max_pixels, self.release_max_pixels) // self.cell**2

    def fit(self, width: int, height: int) -> ImageSize:
        """See SizeRule."""
        if max(width, height) > _QWEN_MAX_RATIO * min(width, height):
            raise _too_long(width, height, f"is over {_QWEN_MAX_RATIO} times as long as it is wide")
        cell = self.cell
        # Half of a cell goes to the even number of cells, as Python rounds.
        rows, columns = round(height / cell), round(width / cell)
        if rows * columns * cell * cell > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / cell))
            columns = max(1, math.floor(width / shrink / cell))
        elif rows * columns * cell * cell < self.min_pixels:
            enlarge = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * enlarge / cell)
            columns = math.ceil(width * enlarge / cell)
        return ImageSize(columns * cell, rows * cell, rows, columns)

    def with_settings(self, settings: Mapping[str, Any]) -> AreaSize:
        """See SizeRule; areas go by two pairs of names."""
        rest = dict(settings)
        size = rest.pop("size", None) or {}
        if not isinstance(size, Mapping):
            raise UserInputError("mm_processor_kwargs.size must be an object.", _SETTINGS)
        given = {**{f"size.{name}": value for name, value in size.items()}, **rest}
        names = {
            "min_pixels": ("size.shortest_edge", "min_pixels"),
            "max_pixels": ("size.longest_edge", "max_pixels"),
        }
        found = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        for field, spellings in names.items():
            for name in spellings:
                value = given.pop(name, None)
                if value is not None:
                    found[field] = self._check_area(name, value)
        _check_known(given, "min_pixels, max_pixels, size.shortest_edge, size.longest_edge")
        changed = replace(self, min_pixels=found["min_pixels"], max_pixels=found["max_pixels"])
        if changed.min_pixels > changed.max_pixels:
            raise UserInputError(
                f"mm_processor_kwargs: the least area of {changed.min_pixels} pixels is above the "
                f"largest, {changed.max_pixels}.",
                _SETTINGS,
            )
        return changed

    def _check_area(self, name: str, value: Any) -> int:
        least, most = self.cell**2, max(self.max_pixels, self.release_max_pixels)
        if type(value) is not int or not least <= value <= most:
            raise UserInputError(
                f"mm_processor_kwargs.{name}={str(value)[:40]} must be a whole number of pixels "
                f"from {least} to {most}.",
                _SETTINGS,
            )
        return value

    def with_detail(self, detail: str) -> AreaSize:
        """See SizeRule."""
        low = max(self.min_pixels, _QWEN_LOW * self.cell**2)
        if detail == "low":
            return replace(self, max_pixels=min(self.max_pixels, low))
        if detail in ("high", "original"):
            return replace(self, max_pixels=max(self.max_pixels, self.release_max_pixels))
        return self

    def for_cpu(self) -> AreaSize:
        """See SizeRule."""
        most = max(self.min_pixels, QWEN_CPU_TOKENS * self.cell**2)
        return replace(self, max_pixels=min(self.max_pixels, most))


@dataclass(frozen=True, slots=True)
class ImageText:
    """What stands in a prompt where a picture is.

    Attributes:
        marker: What chat templates write for a picture.
        soft_token: Spelling of the token that a soft token has in the prompt.
        before: Stands in front of the soft tokens.
        after: Stands behind them.
    """

    marker: str
    soft_token: str
    before: str = ""
    after: str = ""

    def expand(self, num_tokens: int) -> str:
        """Return what the marker becomes."""
        return f"{self.before}{self.soft_token * num_tokens}{self.after}"


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How a model sees pictures; data alone, as its configuration says.

    Attributes:
        name: Of the family.
        placeholder_id: Token id of a soft token in a prompt.
        sizes: Sizes of pictures.
        text: Their text in a prompt.
        normalisation: What the tower does to pixels, in words: part of a picture's identity.
    """

    name: str
    placeholder_id: int
    sizes: SizeRule
    text: ImageText
    normalisation: str

    @property
    def max_tokens(self) -> int:
        """The most soft tokens of one picture."""
        return self.sizes.max_tokens

    def for_cpu(self) -> ImageFamily:
        """Return the family with the budget of a server without an accelerator."""
        return replace(self, sizes=self.sizes.for_cpu())


def gemma3_images(
    placeholder_id: int = 262144, image_size: int = 896, num_tokens: int = 256
) -> ImageFamily:
    """Return how Gemma 3 sees pictures.

    Args:
        placeholder_id: ``image_token_index``.
        image_size: ``vision_config.image_size``.
        num_tokens: ``mm_tokens_per_image``, a square.
    """
    return ImageFamily(
        "gemma3",
        placeholder_id,
        FixedSize(image_size, math.isqrt(num_tokens)),
        ImageText(
            "<start_of_image>",
            "<image_soft_token>",
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
        ),
        "mean 0.5, deviation 0.5",
    )


def gemma4_images(
    placeholder_id: int = 258880,
    patch_size: int = 16,
    pooling: int = 3,
    max_soft_tokens: int = 280,
    max_cells: int = 10_240 // 3,
) -> ImageFamily:
    """Return how Gemma 4 sees pictures; 12B too, whose patches are 3 x 3 of 16 pixels.

    Args:
        placeholder_id: ``image_token_id``.
        patch_size: ``vision_config.patch_size``.
        pooling: ``vision_config.pooling_kernel_size``.
        max_soft_tokens: ``vision_soft_tokens_per_image``.
        max_cells: Soft tokens of a side for which the tower has positions.
    """
    return ImageFamily(
        "gemma4",
        placeholder_id,
        BudgetSize(patch_size * pooling, max_soft_tokens, max_soft_tokens, max_cells),
        ImageText("<|image|>", "<|image|>", before="<|image>", after="<image|>"),
        "none",
    )


def qwen35_images(
    placeholder_id: int = 248056,
    patch_size: int = 16,
    merge_size: int = 2,
    min_pixels: int = 65_536,
    max_pixels: int = 16_777_216,
) -> ImageFamily:
    """Return how Qwen 3.5 to 3.8 see pictures.

    Args:
        placeholder_id: ``image_token_id``.
        patch_size: ``vision_config.patch_size``.
        merge_size: ``vision_config.spatial_merge_size``.
        min_pixels: ``size.shortest_edge`` of the processor.
        max_pixels: ``size.longest_edge`` of the processor.
    """
    return ImageFamily(
        "qwen3_5",
        placeholder_id,
        AreaSize(patch_size * merge_size, min_pixels, max_pixels, max_pixels),
        ImageText("<|image_pad|>", "<|image_pad|>"),
        "mean 0.5, deviation 0.5",
    )


def _check_known(rest: Mapping[str, Any], known: str) -> None:
    unknown = ", ".join(sorted(map(str, rest)))[:100]
    if unknown:
        raise UserInputError(
            f"mm_processor_kwargs has {unknown}, which mean nothing to this model: it knows "
            f"{known}.",
            _SETTINGS,
        )


def _too_long(width: int, height: int, what: str) -> UserInputError:
    return UserInputError(f"has {width} x {height} pixels: it {what}; crop it", "messages")
