"""The pictures of a request, and what turns the rows of its tokens.

prompt   | text | picture of 2 x 3 soft tokens | text |  answer
number   0 1 2    3 3 3 3 3 3                    6 7 8    9 ..
row               3 3 3 4 4 4
column            3 4 5 3 4 5
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.exceptions import InvariantError
from vllm.v1.core.sched.output import NewRequestData


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request.

    Attributes:
        key: Under which its rows are kept.
        offset: Its first token.
        grid: Rows and columns of soft tokens.
        pixels: uint8 ``[H, W, 3]``.
    """

    key: str
    offset: int
    grid: tuple[int, int]
    pixels: np.ndarray

    @property
    def end(self) -> int:
        """Behind its last token."""
        return self.offset + self.grid[0] * self.grid[1]


class RequestPictures:
    """The pictures of one request, in the order of its prompt.

    Args:
        pictures: Theirs.
        num_prompt_tokens: Of the prompt.
    """

    def __init__(self, pictures: Sequence[Picture], num_prompt_tokens: int) -> None:
        self.pictures = tuple(pictures)
        self._axes, self._delta = _lay_out(self.pictures, num_prompt_tokens)

    @classmethod
    def from_data(cls, data: NewRequestData) -> "RequestPictures | None":
        """Read those of a new request; None: it has none."""
        if not data.mm_features:
            return None
        keys = data.encoder_keys or [feature.identifier for feature in data.mm_features]
        pictures = []
        for key, feature in zip(keys, data.mm_features, strict=True):
            item: Mapping[str, Any] | None = feature.data
            if item is None or "pixels" not in item:
                raise InvariantError(f"request {data.req_id} has a picture without pixels")
            rows, columns = item["grid"]
            picture = Picture(key, feature.mm_position.offset, (rows, columns), item["pixels"])
            if picture.end - picture.offset != feature.mm_position.length:
                raise InvariantError(
                    f"request {data.req_id} has a picture of {rows} x {columns} soft tokens in "
                    f"{feature.mm_position.length} places"
                )
            pictures.append(picture)
        return cls(pictures, len(data.prompt_token_ids or ()))

    def find(self, start: int, end: int) -> list[Picture]:
        """Return those with tokens among ``[start, end)``."""
        return [own for own in self.pictures if own.offset < end and own.end > start]

    def put_axes(self, start: int, axes: np.ndarray) -> None:
        """Write what turns the tokens from ``start`` on.

        Mutates:
            axes int64 ``[3, N]``.
        """
        num_known = max(0, min(self._axes.shape[1] - start, axes.shape[1]))
        axes[:, :num_known] = self._axes[:, start : start + num_known]
        first = start + num_known + self._delta
        axes[:, num_known:] = np.arange(first, first + axes.shape[1] - num_known)


def _lay_out(pictures: Sequence[Picture], num_tokens: int) -> tuple[np.ndarray, int]:
    """Returns number, row and column of each token, and what is added to places behind them."""
    axes = np.empty((3, num_tokens), dtype=np.int64)
    at = place = 0
    for own in pictures:
        axes[:, at : own.offset] = np.arange(place, place + own.offset - at)
        place += own.offset - at
        rows, columns = own.grid
        axes[0, own.offset : own.end] = place
        axes[1, own.offset : own.end] = place + np.repeat(np.arange(rows), columns)
        axes[2, own.offset : own.end] = place + np.tile(np.arange(columns), rows)
        place += max(rows, columns)
        at = own.end
    axes[:, at:] = np.arange(place, place + num_tokens - at)
    return axes, place - at
