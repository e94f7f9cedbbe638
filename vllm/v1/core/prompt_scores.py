"""Log probabilities of prompts' tokens, kept by prefix: a prompt that is scored again may hit.

Row p of a prompt predicts its token p + 1. What is kept of a unit are the log probabilities of its
own tokens; the unit's hash stands for all that they depend on. With units of u tokens:

    token    1 ...... u-1 | u ........ 2u-1 | 2u ...
    row      0 ...... u-2 | u-1 ...... 2u-2 | 2u-1 ..
             unit 0       | unit 1          | unit 2

Where the first c units are known a request resumes at most at c - 1 units: the token behind unit
c - 1 is another one in each prompt, and the row that predicts it has to be computed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vllm.utils.hashing import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request

# With one alternative a token takes some 20 bytes, with twenty 170.
MAX_BYTES = 1 << 26
# What a unit takes beside its rows.
_UNIT_BYTES = 512

_Key: TypeAlias = tuple[BlockHash, int]


class ScoreRows(NamedTuple):
    """Log probabilities of consecutive prompt tokens; column 0 is the token itself."""

    token_ids: npt.NDArray[np.int32]  # [n, k + 1]
    logprobs: npt.NDArray[np.float32]  # [n, k + 1]
    ranks: npt.NDArray[np.int32]  # [n], 1 = most likely

    @classmethod
    def of(cls, tensors: Any) -> ScoreRows:
        """Take what a worker reported: arrays, or tensors in the processor's memory."""
        token_ids, logprobs, ranks = map(np.asarray, tensors)
        return cls(token_ids.astype(np.int32), logprobs, ranks.astype(np.int32))

    @classmethod
    def joined(cls, parts: list[ScoreRows]) -> ScoreRows:
        """Put rows one behind another; there is at least one part."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))

    def cut(self, begin: int, end: int) -> ScoreRows:
        """Return a copy of some rows, which keeps no others in memory."""
        token_ids, logprobs, ranks = self
        return ScoreRows(
            token_ids[begin:end].copy(), logprobs[begin:end].copy(), ranks[begin:end].copy()
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self)


@dataclass(slots=True)
class _Scored:
    """A request that wants the log probabilities of its prompt, from its first admission on.

    Attributes:
        next_row: The worker's next row; those before it are told, or stand in ``untold``.
        untold: Rows that were known, until something of the request is told.
        rest: Rows behind the last unit that was kept, the worker's last ones.
        coming: Units whose rows it has yet to bring, from the next one on; empty while it waits.
    """

    next_row: int
    untold: ScoreRows | None
    rest: ScoreRows | None = None
    coming: deque[_Key] = field(default_factory=deque)


class PromptScores:
    """What is known of prompts' log probabilities, and who brings more.

    Owns: rows by unit and number of alternatives, the least recently used given up first; what
    was told to each request that wants them.

    Args:
        unit: Tokens under one hash.
        max_bytes: Of all rows.
    """

    def __init__(self, unit: int, max_bytes: int = MAX_BYTES) -> None:
        self._unit = unit
        self._max_bytes = max_bytes
        self._known: OrderedDict[_Key, ScoreRows] = OrderedDict()
        self._num_bytes = 0
        self._scored: dict[str, _Scored] = {}
        self._coming: Counter[_Key] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes that are taken."""
        return self._num_bytes

    def find_limit(self, request: Request) -> int:
        """Return the tokens at which a request may resume at most."""
        scored = self._scored.get(request.request_id)
        if scored is None:
            # Token 0 is predicted by nothing.
            return max(0, self._num_known(self._keys(request)) * self._unit - 1)
        if scored.next_row >= request.num_prompt_tokens - 1:
            return request.num_tokens
        # Of what it was promised nothing is taken back, and nothing more is promised: rows that
        # are on their way follow these.
        return 0 if scored.untold is not None else scored.next_row

    def is_coming(self, request: Request) -> bool:
        """Whether a request that runs is about to bring the next unit that is not known."""
        if request.request_id in self._scored or not request.leaves_all:
            return False
        keys = self._keys(request)
        num_known = self._num_known(keys)
        return num_known < len(keys) and self._coming[keys[num_known]] > 0

    def admit(self, request: Request, start: int) -> None:
        """Take note that a request begins at so many tokens."""
        scored = self._scored.get(request.request_id)
        if scored is None:
            untold = self._take_known(request, start) if start else None
            scored = self._scored[request.request_id] = _Scored(start, untold)
        if not request.leaves_all:
            return
        keys = self._keys(request)[self._first_unit(scored.next_row) :]
        scored.coming = deque(keys)
        self._coming.update(keys)

    def pause(self, request: Request) -> None:
        """Take note that a request lost its blocks, or has ended."""
        scored = self._scored.get(request.request_id)
        if scored is None:
            return
        while scored.coming:
            self._drop_coming(scored)
        if request.is_finished():
            del self._scored[request.request_id]

    def add(self, request: Request, tensors: Any) -> ScoreRows | None:
        """Keep what a step brought of a prompt.

        Args:
            request: Whose prompt it is.
            tensors: The worker's rows, those that follow the last ones; None: there are none.

        Returns:
            What the request is to be told now, known rows first; None: nothing.
        """
        rows = None if tensors is None else ScoreRows.of(tensors)
        scored = self._scored.get(request.request_id)
        if scored is None:
            return rows
        parts = [part for part in (scored.untold, rows) if part is not None]
        scored.untold = None
        if rows is not None:
            self._keep(request, scored, rows)
        return ScoreRows.joined(parts) if parts else None

    def reset(self) -> None:
        """Forget all rows: they may be another model's."""
        self._known.clear()
        self._num_bytes = 0
        for scored in self._scored.values():
            scored.rest = None

    # ---- units -------------------------------------------------------------------------------

    def _keys(self, request: Request) -> list[_Key]:
        """The units of a prompt, whole ones."""
        assert request.num_scores is not None
        num_units = request.num_prompt_tokens // self._unit
        return [(unit, request.num_scores) for unit in request.block_hashes[:num_units]]

    def _first_unit(self, row: int) -> int:
        """The first unit all of whose rows are this one or later ones."""
        return -(-(row + 1) // self._unit) if row else 0

    def _num_known(self, keys: list[_Key]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._known), len(keys))

    def _take_known(self, request: Request, start: int) -> ScoreRows:
        """The rows before a place, all of which are known; they are used last of all now."""
        keys = self._keys(request)[: start // self._unit + 1]
        for key in reversed(keys):
            self._known.move_to_end(key)
        return ScoreRows.joined([self._known[key] for key in keys]).cut(0, start)

    def _keep(self, request: Request, scored: _Scored, rows: ScoreRows) -> None:
        """Keep whole units of a worker's rows, and the rest until more come."""
        if not request.leaves_all:
            scored.next_row += len(rows.ranks)
            return
        unit, keys = self._unit, self._keys(request)
        if scored.rest is not None:
            rows, first = ScoreRows.joined([scored.rest, rows]), scored.next_row
            first -= len(scored.rest.ranks)
        else:
            first = scored.next_row
        end = first + len(rows.ranks)
        scored.next_row = end
        index = self._first_unit(first)
        while index < len(keys) and (index + 1) * unit - 1 <= end:
            begin = max(index * unit - 1, 0) - first
            self._put(keys[index], rows.cut(begin, (index + 1) * unit - 1 - first))
            index += 1
        begin = max(index * unit - 1, 0) - first
        scored.rest = rows.cut(begin, len(rows.ranks)) if 0 <= begin < len(rows.ranks) else None
        while scored.coming and len(keys) - len(scored.coming) < index:
            self._drop_coming(scored)

    def _put(self, key: _Key, rows: ScoreRows) -> None:
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = rows
        self._num_bytes += rows.num_bytes + _UNIT_BYTES
        while self._num_bytes > self._max_bytes:
            _, oldest = self._known.popitem(last=False)
            self._num_bytes -= oldest.num_bytes + _UNIT_BYTES

    def _drop_coming(self, scored: _Scored) -> None:
        key = scored.coming.popleft()
        self._coming[key] -= 1
        if not self._coming[key]:
            del self._coming[key]
