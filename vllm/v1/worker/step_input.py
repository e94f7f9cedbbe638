"""One step's tokens of all requests as one flat batch, and which of its rows want logits.

    flat rows   | req 0: prefill chunk      | req 1 | req 2: 1 + 2 drafts |
    sampled     |  (the last row, if the    |   x   |   x     x     x     |
                |   chunk ends the prompt)  |       |                     |

Prefill and decode are not told apart: a request is sampled in a step that reaches the end of its
known tokens, at one position more than it has drafts. Of a request for vectors rows are *pooled* in
its place.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from vllm.exceptions import InvariantError
from vllm.model_executor.towers.plans import BothWays
from vllm.v1.attention.metadata import RequestSlice
from vllm.v1.core.values.cache_step import RowBounds
from vllm.v1.worker.request_state import RequestState

_NO_DRAFTS: tuple[int, ...] = ()
_EVERYTHING = RowBounds(write_from=())
_NOTHING_CARRIED: Mapping[str, int] = MappingProxyType({})
_NO_BOUNDS: Mapping[str, RowBounds] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepInput:
    """The flat batch of one step. T tokens, R requests, M sampled rows.

    Attributes:
        requests: In batch order.
        slices: Their tokens and block tables.
        token_ids, positions: int64 ``[T]``; views of buffers that the next step overwrites.
        row_starts: First flat row of each request.
        sampled_rows: int64 ``[M]`` flat rows, a request's in order.
        sampled_counts: Rows of each request in ``sampled_rows``; 0 for a chunk that does not reach
            the end of the known tokens.
        drafts: Draft tokens of each request; those of row k guess the token after it.
        carried_rows: int64 ``[C]``: flat rows whose tokens are still on the device.
        carried_from: int64 ``[C]``: the sampled rows of the step before that gave them.
        pooled: The flat rows that requests for vectors want of this step, by place in the batch.
        ended: Places of those requests for vectors whose prompt ends in this step.
    """

    requests: list[RequestState]
    slices: list[RequestSlice]
    token_ids: np.ndarray
    positions: np.ndarray
    row_starts: list[int]
    sampled_rows: np.ndarray
    sampled_counts: list[int]
    drafts: list[Sequence[int]]
    carried_rows: np.ndarray
    carried_from: np.ndarray
    pooled: Mapping[int, range] = field(default_factory=dict)
    ended: Collection[int] = ()

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


class StepInputBuilder:
    """Flattens steps into buffers that live as long as the worker.

    Args:
        max_num_tokens: Tokens of the largest step.
        max_model_len: Positions are below this.
        reads_all: Whether the streams of all rows are read; else those of sampled rows, and all of
            requests that want log probabilities of their prompt.
        num_previous: How many tokens before a step's own the model reads the ids of.
        keeps_all: Whether what a step stores is read by others than its own request's later steps.
        both_ways: In which layers the rows of one picture see each other both ways.
    """

    def __init__(
        self,
        max_num_tokens: int,
        max_model_len: int,
        *,
        reads_all: bool = True,
        num_previous: int = 0,
        keeps_all: bool = True,
        both_ways: BothWays = "nowhere",
    ) -> None:
        self._both_ways = both_ways
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_tokens, dtype=np.int64)
        self._sampled_rows = np.zeros(max_num_tokens, dtype=np.int64)
        self._reads_all = reads_all
        self._num_previous = num_previous
        self._keeps_all = keeps_all
        self._counting = np.arange(max(max_num_tokens, max_model_len), dtype=np.int64)

    def build(
        self,
        requests: list[RequestState],
        num_scheduled: Sequence[int],
        drafts_by_id: Mapping[str, Sequence[int]],
        bounds_by_id: Mapping[str, RowBounds] = _NO_BOUNDS,
        carried: Mapping[str, int] = _NOTHING_CARRIED,
    ) -> StepInput:
        """Lay out one step.

        Args:
            requests: In batch order, their states up to date.
            num_scheduled: Tokens of each, drafts included; positive.
            drafts_by_id: Draft tokens of requests that have some.
            bounds_by_id: What requests write that do not write everything.
            carried: Requests whose last known token is still on the device -> the sampled row of
                the step before that gave it.

        Raises:
            InvariantError: A request is scheduled past its known tokens.
        """
        slices: list[RequestSlice] = []
        row_starts: list[int] = []
        counts: list[int] = []
        drafts: list[Sequence[int]] = []
        carried_rows: list[int] = []
        carried_from: list[int] = []
        pooled: dict[int, range] = {}
        ended: list[int] = []
        row = num_sampled = 0
        for state, num_tokens in zip(requests, num_scheduled, strict=True):
            guessed = drafts_by_id.get(state.req_id, _NO_DRAFTS) if drafts_by_id else _NO_DRAFTS
            start, end = state.num_computed_tokens, state.num_computed_tokens + num_tokens
            if guessed:
                state.place_drafts(guessed)
            count = _count_sampled(state, end, len(guessed))
            next_row = row + num_tokens
            first_pooled, all_rows = end, False
            if state.pooling is not None:
                all_rows = state.pooling.all_rows
                first_pooled = max(start, state.num_pooled) if all_rows else end - count
                if first_pooled < end:
                    pooled[len(slices)] = range(row + first_pooled - start, next_row)
                    state.num_pooled = end
                if count:
                    ended.append(len(slices))
                    count = 0
            self._token_ids[row:next_row] = state.get_tokens(start, end)
            self._positions[row:next_row] = self._counting[start:end]
            if state.tokens_in_flight:
                (position,) = state.tokens_in_flight.values()
                if position < end:
                    carried_rows.append(row + position - start)
                    carried_from.append(carried[state.req_id])
            sampled_end = num_sampled + count
            self._sampled_rows[num_sampled:sampled_end] = self._counting[
                next_row - count : next_row
            ]
            bounds = bounds_by_id.get(state.req_id, _EVERYTHING) if bounds_by_id else _EVERYTHING
            reads_all = self._reads_all or state.sampling.params.prompt_logprobs is not None
            output_from = bounds.output_from if self._keeps_all else state.num_tokens - 1
            wanted, views = 0 if reads_all else min(end - count, first_pooled), state.tables.views
            slices.append(
                RequestSlice(
                    start,
                    num_tokens,
                    views,
                    bounds.write_from,
                    bounds.read_from,
                    wanted,
                    len(guessed),
                    0 if reads_all or all_rows else output_from,
                    self._find_previous(state, start) if self._num_previous else None,
                    self._find_pictures(state, start, end) if state.pictures else (),
                    self._both_ways == "everywhere",
                )
            )
            row_starts.append(row)
            counts.append(count)
            drafts.append(guessed)
            row, num_sampled = next_row, sampled_end
        return StepInput(
            requests=requests,
            slices=slices,
            token_ids=self._token_ids[:row],
            positions=self._positions[:row],
            row_starts=row_starts,
            sampled_rows=self._sampled_rows[:num_sampled],
            sampled_counts=counts,
            drafts=drafts,
            carried_rows=np.array(carried_rows, dtype=np.int64),
            carried_from=np.array(carried_from, dtype=np.int64),
            pooled=pooled,
            ended=ended,
        )

    def _find_pictures(self, state: RequestState, start: int, end: int) -> list[tuple[int, int]]:
        """Returns where a step's pictures lie whose rows see each other both ways."""
        if self._both_ways == "nowhere" or state.pictures is None:
            return []
        return [(own.offset, own.end) for own in state.pictures.find(start, end)]

    def _find_previous(self, state: RequestState, start: int) -> list[int]:
        """Returns the ids before a step's; those in flight are never among them: one is at most."""
        known: list[int] = state.get_tokens(max(0, start - self._num_previous), start).tolist()
        return [-1] * (self._num_previous - len(known)) + known


def _count_sampled(state: RequestState, end: int, num_drafts: int) -> int:
    num_known = state.num_tokens + num_drafts
    if end < num_known:
        return 0
    if end > num_known:
        raise InvariantError(
            f"request {state.req_id} is scheduled up to position {end}, but the worker knows "
            f"{state.num_tokens} tokens and {num_drafts} drafts"
        )
    return num_drafts + 1
