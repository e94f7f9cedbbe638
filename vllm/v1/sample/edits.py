"""Changes to logits before a token is chosen, each for all rows of a batch at once.

The order: what the grammar, allowed tokens, bad words and ``min_tokens`` forbid; the bias; the
penalties; last, tokens forced by a thinking budget. What is forbidden is at -inf and stays there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.utils.uploads import upload
from vllm.v1.sample.history import RowHistory, SeenTokens
from vllm.v1.sample.request_edits import RequestEdits

# Byte of a mask -> bounds of its eight tokens, lowest bit first.
_BOUNDS_OF_BYTE = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)


@dataclass(frozen=True, slots=True)
class Cells:
    """Single logits: ``logits[rows[i], ids[i]]``.

    Attributes:
        rows, ids: int64 ``[N]``, on the device.
        values: float32 ``[N]``, or None where the value is known.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None = None

    def forbid(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        logits[self.rows, self.ids] = -torch.inf

    def force(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        logits[self.rows] = -torch.inf
        logits[self.rows, self.ids] = 0.0

    def add(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        assert self.values is not None
        logits[self.rows, self.ids] += self.values

    @classmethod
    def gather(
        cls,
        parts: Sequence[tuple[int, np.ndarray, np.ndarray | None]],
        device: torch.device,
    ) -> Self | None:
        """Join (row, ids, values) of several rows; None when there are none."""
        if not parts:
            return None
        rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
        values = [part for _, _, part in parts if part is not None]
        return cls(
            upload(rows, device),
            upload(np.concatenate([ids for _, ids, _ in parts]), device),
            upload(np.concatenate(values), device) if values else None,
        )


@dataclass(frozen=True, slots=True)
class RowMask:
    """Rows of which only some tokens are possible.

    Bounds, not flags: the lesser of two floats is found for many at a time, a choice by a flag is
    not, and costs ten times as much on a CPU.

    Attributes:
        rows: int64 ``[N]``.
        bounds: float32 ``[N, V]``: infinity for what is possible, else -infinity.
    """

    rows: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def from_bits(
        cls, rows: np.ndarray, bits: np.ndarray, vocab_size: int, device: torch.device
    ) -> Self:
        """Unpack masks.

        Args:
            rows: int64 ``[N]``.
            bits: int32 ``[N, ceil(V / 32)]``: bit b of word w allows token 32 w + b.
            vocab_size: V.
            device: Of the logits.
        """
        packed = np.ascontiguousarray(bits).view(np.uint8)
        if device.type == "cpu":
            unpacked = torch.from_numpy(np.take(_BOUNDS_OF_BYTE, packed, axis=0))
        else:
            table = upload(_BOUNDS_OF_BYTE, device)
            unpacked = table[upload(packed, device).int()]
        return cls(upload(rows, device), unpacked.flatten(1)[:, :vocab_size])

    @classmethod
    def from_ids(
        cls, chosen: Sequence[tuple[int, np.ndarray]], vocab_size: int, device: torch.device
    ) -> Self:
        """Allow listed tokens.

        Args:
            chosen: Rows and their tokens' ids.
            vocab_size: V.
            device: Of the logits.
        """
        bounds = np.full((len(chosen), vocab_size), -np.inf, dtype=np.float32)
        for k, (_, ids) in enumerate(chosen):
            bounds[k, ids] = np.inf
        rows = np.array([row for row, _ in chosen], dtype=np.int64)
        return cls(upload(rows, device), upload(bounds, device))

    def apply(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        if len(self.rows) == len(logits):
            torch.minimum(logits, self.bounds, out=logits)
        else:
            logits[self.rows] = torch.minimum(logits[self.rows], self.bounds)

    def revive(self, logits: torch.Tensor) -> None:
        """Where nothing is left, make all that this mask allows equally likely.

        Mutates: ``logits`` ``[R, V]``.
        """
        is_dead = logits[self.rows].amax(-1) == -torch.inf
        if bool(is_dead.any()):
            logits[self.rows[is_dead]] = self.bounds[is_dead].clamp_(max=0.0)

    def revive_unseen(self, logits: torch.Tensor) -> None:
        """As ``revive``, but the host is not told which rows are dead: all are written.

        Mutates: ``logits`` ``[R, V]``.
        """
        own = logits[self.rows]
        is_dead = own.amax(-1, keepdim=True) == -torch.inf
        logits[self.rows] = torch.where(is_dead, self.bounds.clamp(max=0.0), own)


# (logits fp32 [R, V], rows int64 [N], bits int32 [N, ceil(V / 32)]) -> None: sets to -inf what the
# bits forbid. Rows rise; bit b of word w allows token 32 w + b.
ForbidTokens = Callable[[torch.Tensor, np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class PackedMask:
    """As ``RowMask``, its bits left as they are for one who reads them so.

    Attributes:
        rows: int64 ``[N]``.
        bits: int32 ``[N, ceil(V / 32)]``.
        forbid: Applies them.
        unpack: Makes a ``RowMask`` of them, for the rare batch whose rules leave a row nothing.
    """

    rows: np.ndarray
    bits: np.ndarray
    forbid: ForbidTokens
    unpack: Callable[[], RowMask]

    def apply(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        self.forbid(logits, self.rows, self.bits)

    def revive(self, logits: torch.Tensor) -> None:
        """As ``RowMask.revive``."""
        self.unpack().revive(logits)

    def revive_unseen(self, logits: torch.Tensor) -> None:
        """As ``RowMask.revive_unseen``."""
        self.unpack().revive_unseen(logits)


GrammarRows: TypeAlias = RowMask | PackedMask


@dataclass(frozen=True, slots=True)
class FixedEdits:
    """Edits that stay the same while the batch does; None: no row asks.

    Attributes:
        allowed: Of ``allowed_token_ids``.
        banned: Bad words of one token.
        bias: Of ``logit_bias``.
    """

    allowed: RowMask | None
    banned: Cells | None
    bias: Cells | None

    @classmethod
    def build(
        cls, rows: Sequence[RequestEdits | None], vocab_size: int, device: torch.device
    ) -> Self | None:
        """Lay out the edits of a batch's rows; None when there are none."""
        asking = [(i, edits) for i, edits in enumerate(rows) if edits is not None]
        if not asking:
            return None
        return cls(
            allowed=_build_allowed(asking, vocab_size, device),
            banned=Cells.gather(
                [(i, e.banned_ids, None) for i, e in asking if e.banned_ids is not None], device
            ),
            bias=Cells.gather(
                [(i, e.bias_ids, e.bias_values) for i, e in asking if e.bias_ids is not None],
                device,
            ),
        )


def _build_allowed(
    asking: Sequence[tuple[int, RequestEdits]], vocab_size: int, device: torch.device
) -> RowMask | None:
    chosen = [(i, e.allowed_ids) for i, e in asking if e.allowed_ids is not None]
    return RowMask.from_ids(chosen, vocab_size, device) if chosen else None


@dataclass(frozen=True, slots=True)
class Penalties:
    """The tokens that penalties concern, one entry per row and distinct token.

    Attributes:
        cells: Where.
        counts: float32 ``[N]``: times in the answer; 0: in the prompt only.
        repetition, presence, frequency: float32 ``[N]``.
    """

    cells: Cells
    counts: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor

    @classmethod
    def build(
        cls, rows: Sequence[tuple[int, SeenTokens, SamplingParams]], device: torch.device
    ) -> Self | None:
        """Lay out the rows with penalties; None when no token is concerned."""
        sizes = [len(seen.ids) for _, seen, _ in rows]
        if not sum(sizes):
            return None
        cells = Cells.gather([(row, seen.ids, None) for row, seen, _ in rows], device)
        assert cells is not None
        factors = np.array(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, _, p in rows],
            dtype=np.float32,
        )
        repetition, presence, frequency = upload(np.repeat(factors, sizes, axis=0).T, device)
        counts = np.concatenate([seen.counts for _, seen, _ in rows]).astype(np.float32)
        return cls(cells, upload(counts, device), repetition, presence, frequency)

    def apply(self, logits: torch.Tensor) -> None:
        """Mutates: ``logits`` ``[R, V]``."""
        values = logits[self.cells.rows, self.cells.ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values = values - self.frequency * self.counts - self.presence * (self.counts > 0)
        logits[self.cells.rows, self.cells.ids] = values


@dataclass(frozen=True, slots=True)
class StepEdits:
    """Edits that follow from the tokens before each row; None: no row asks.

    Attributes:
        grammar: Of structured outputs.
        banned: Tokens that would complete a bad word.
        penalties: Presence, frequency and repetition.
        forced: The only token a row may yield.
    """

    grammar: GrammarRows | None
    banned: Cells | None
    penalties: Penalties | None
    forced: Cells | None

    @classmethod
    def build(
        cls,
        rows: Sequence[tuple[int, RowHistory, SamplingParams]],
        grammar: GrammarRows | None,
        device: torch.device,
    ) -> Self | None:
        """Lay out a step's rows with a history; None when nothing is to be done."""
        if not rows and grammar is None:
            return None
        forced = [(i, h.forced_id) for i, h, _ in rows if h.forced_id is not None]
        banned = [(i, np.array(h.banned_ids), None) for i, h, _ in rows if h.banned_ids]
        return cls(
            grammar=grammar,
            banned=Cells.gather(banned, device),
            penalties=Penalties.build(
                [(i, h.seen, p) for i, h, p in rows if h.seen is not None], device
            ),
            forced=Cells.gather([(i, np.array([token]), None) for i, token in forced], device),
        )


_NOTHING_FIXED = FixedEdits(None, None, None)
_NOTHING_NEW = StepEdits(None, None, None, None)


def apply_edits(
    logits: torch.Tensor,
    fixed: FixedEdits | None,
    step: StepEdits | None,
    stops: Cells | None,
) -> None:
    """Apply what a batch asks for.

    A row in which nothing is left, because its rules contradict each other, follows its grammar, or
    else its allowed tokens, alone.

    Args:
        logits: fp32 ``[R, V]``.
        fixed: The batch's edits.
        step: The step's.
        stops: Stop tokens that would come before ``min_tokens``.

    Mutates: ``logits``.
    """
    fixed = fixed or _NOTHING_FIXED
    step = step or _NOTHING_NEW
    masks: list[GrammarRows] = [m for m in (fixed.allowed, step.grammar) if m is not None]
    for mask in masks:
        mask.apply(logits)
    forbidden = [cells for cells in (fixed.banned, step.banned, stops) if cells is not None]
    for cells in forbidden:
        cells.forbid(logits)
    if fixed.bias is not None:
        fixed.bias.add(logits)
    if step.penalties is not None:
        step.penalties.apply(logits)
    if len(masks) > 1 or forbidden:
        for mask in masks:
            if logits.is_cuda:
                mask.revive_unseen(logits)
            else:
                mask.revive(logits)
    if step.forced is not None:
        step.forced.force(logits)
