"""What a step's indexers chose, for layers that attend to another layer's choice."""

import torch

# A decode batch, or the chunk and the first query of a tile of it.
Place = tuple[int] | tuple[int, int]


class Selections:
    """The choices of one forward pass.

    An indexer's layer leaves its choice of every batch and tile; the layers above it read that,
    until the next indexer of the model overwrites it. Where there are no more entries than are
    chosen nothing is, and nothing is left.

    Owns: the choices.

    Attributes:
        chosen: bool [..., K], exactly so many True in a row as are chosen.
        candidates: bool [..., K]: what later indexers may choose of.
    """

    def __init__(self) -> None:
        self.chosen: dict[Place, torch.Tensor] = {}
        self.candidates: dict[Place, torch.Tensor] = {}
