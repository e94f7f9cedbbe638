"""How a layer's part of a block is read: by the attention ops, and by whoever moves memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from vllm.v1.kv_cache_specs.recurrent import StateLayout

GroupKind = Literal["window", "state", "dense", "keys", "recurrent"]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Geometry of one KV group, as the attention ops see it.

    Attributes:
        kind: "window" (the last tokens' latent rows), "state" (open compressor rows), "dense"
            (compressed entries, kept forever), "keys" (keys and values of every token, or of a
            window's) or "recurrent" (one state, cut over several blocks).
        block_size: Tokens one block covers.
        rows_per_block: Rows one block stores.
        ratio: Tokens per compressed entry; 1 for "window" and "keys".
        window: Tokens attended, the query's own included; 0: all, or another kind.
        has_overlap: A "state" group whose entries also read the window before theirs.
        state: A "recurrent" group's: where the parts of a state lie in its blocks.
    """

    kind: GroupKind
    block_size: int
    rows_per_block: int
    ratio: int = 1
    window: int = 0
    has_overlap: bool = False
    state: StateLayout | None = None


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One layer's page, as an array ``[rows, width]``.

    Attributes:
        rows: Rows a block stores.
        width: Values of a row.
        dtype: Of a value.
    """

    rows: int
    width: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes that the rows fill; the page may be larger."""
        return self.rows * self.width * self.dtype.itemsize
