"""What grammars allow in one step, in the form that goes to the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import Future

    from vllm.v1.structured_output.grammar import Grammar


class MaskWork(NamedTuple):
    """Masks to fill.

    Attributes:
        grammar: Open, and where its request stands.
        row: Of the next token's mask.
        drafts: Tokens that may follow; the mask of what comes after each stands one row further.
    """

    grammar: Grammar
    row: int
    drafts: Sequence[int] = ()


class GrammarMasks:
    """Bit masks of the rows that follow a grammar.

    They may still be filled while the model runs: who reads ``bits`` waits for them.

    Args:
        first_rows: Requests with a grammar, and where their rows begin in ``bits``; a request has a
            row for each of its drafts and one more.
        bits: int32 ``[N, ceil(V / 32)]``: bit b of word w allows token 32 w + b.
        filled: Done when ``bits`` is; None: it is.
    """

    def __init__(
        self, first_rows: dict[str, int], bits: np.ndarray, filled: Future[None] | None = None
    ) -> None:
        self.first_rows = first_rows
        self._bits, self._filled = bits, filled

    @property
    def bits(self) -> np.ndarray:
        """The masks, filled."""
        if self._filled is not None:
            self._filled.result()
        return self._bits

    def __reduce__(self) -> tuple[type[GrammarMasks], tuple[dict[str, int], np.ndarray]]:
        """Go to another process filled."""
        return GrammarMasks, (self.first_rows, self.bits)
