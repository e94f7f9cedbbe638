"""What pictures change in a step: whose embeddings a tower made, how rows are turned.

Which rows of a picture see each other both ways is part of the index tables: see ``RequestSlice``.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StepPictures:
    """Pictures in a step of T rows.

    Attributes:
        rows: Flat rows of soft tokens, int64 [S]; ascending.
        values: What stands in the place of their embeddings, unscaled: fp32 [S, D].
        axes: int64 [3, T]: by which number, row and column rows are turned; None: by positions.
    """

    rows: torch.Tensor
    values: torch.Tensor
    axes: torch.Tensor | None = None

    def merge_into(self, embedded: torch.Tensor) -> None:
        """Puts the rows in the place of embeddings [T, D].

        Mutates:
            embedded.
        """
        if len(self.rows):
            embedded[self.rows] = self.values.to(embedded.dtype)

    def hide_ids(self, token_ids: torch.Tensor, token_id: int) -> torch.Tensor:
        """Returns token ids [T] in which one stands in the place of all soft tokens."""
        if not len(self.rows):
            return token_ids
        hidden = token_ids.clone()
        hidden[self.rows] = token_id
        return hidden
