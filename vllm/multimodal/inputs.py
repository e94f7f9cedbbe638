"""Where multimodal items stand in a prompt."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlaceholderRange:
    """The tokens of a prompt that stand for one item.

    Attributes:
        offset: First token.
        length: Tokens.
        is_embed: bool ``[length]``: which of them take an embedding; None: all.
    """

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def get_num_embeds(self) -> int:
        """Return the embeddings the item needs."""
        return self.length if self.is_embed is None else int(self.is_embed.sum())

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Return which of the item's embeddings fall into tokens ``[start_idx, end_idx)``.

        Args:
            start_idx: First token, counted from the item's first.
            end_idx: One past the last.

        Returns:
            First embedding and one past the last.
        """
        if self.is_embed is None:
            return start_idx, end_idx
        first = int(self.is_embed[:start_idx].sum())
        return first, first + int(self.is_embed[start_idx:end_idx].sum())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        if self.is_embed is None or other.is_embed is None:
            return self.is_embed is other.is_embed
        return self.is_embed.tolist() == other.is_embed.tolist()

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


class MultiModalKwargsItem(UserDict[str, Any]):
    """A processed item: the encoder's inputs by name."""

    @classmethod
    def dummy(cls, modality: str = "dummy", nbytes: int = 1) -> MultiModalKwargsItem:
        """Return an item without meaning, of a given size."""
        return cls({modality: bytes(nbytes)})


@dataclass
class MultiModalFeatureSpec:
    """One item of a request.

    Attributes:
        data: The processed item; None where another process holds it.
        modality: Such as "image".
        identifier: Key of its encoder output, and part of the prefix hashes.
        mm_position: Its place in the prompt.
        mm_hash: Hash of the item alone, if it differs from the identifier.
    """

    data: MultiModalKwargsItem | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


class ImageFeature(msgspec.Struct, frozen=True):
    """One picture of a request, as processes hand it on.

    Attributes:
        identifier: Its identity: 64 hex digits (``vllm.multimodal.identity``).
        offset: Of its first soft token in the prompt.
        rows: Soft tokens from top to bottom.
        columns: Soft tokens from left to right.
        height: Pixels.
        width: Pixels.
        pixels: RGB, row by row; empty: whoever needs them has what became of them.
    """

    identifier: str
    offset: int
    rows: int
    columns: int
    height: int
    width: int
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        """Soft tokens."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """One past its last soft token."""
        return self.offset + self.num_tokens

    def to_spec(self) -> MultiModalFeatureSpec:
        """Return it as schedulers and workers know it."""
        # A copy: torch takes no array that may not be written to.
        pixels = np.frombuffer(bytearray(self.pixels), np.uint8)
        pixels = pixels.reshape(self.height, self.width, 3)
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem({"pixels": pixels, "grid": (self.rows, self.columns)}),
            modality="image",
            identifier=self.identifier,
            mm_position=PlaceholderRange(self.offset, self.num_tokens),
        )
