"""What grammars allow in one step, in the form that goes to the workers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Bit masks of the rows that follow a grammar.

    Attributes:
        first_rows: Requests with a grammar, and where their rows begin in ``bits``; a request has a
            row for each of its drafts and one more.
        bits: int32 ``[N, ceil(V / 32)]``: bit b of word w allows token 32 w + b.
    """

    first_rows: dict[str, int]
    bits: np.ndarray
