"""Lookups: what followed the last tokens where they stood before is drafted again."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from vllm.v1.spec_decode.earlier_texts import EarlierTexts
from vllm.v1.spec_decode.weighing import Agreement, Draft, DraftWeigher, Passage
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.step_input import StepInput

# So many last tokens say more than that a passage was repeated up to the one before.
_SURE_MATCH = 2
# A look takes time, too: 2% of a small model's step, most of it for what the weights have driven
# out of the processor's caches. Looks that drafts do not pay for are made in one of so many steps;
# what was paid longer ago counts less, and debts are at most so many looks.
_LOOK_STEPS = 8
_KEPT, _MOST_LOOKS = 0.98, 16.0
# So many places tell what mostly follows: the latest.
_MOST_PLACES = 32


class NgramProposer:
    """Drafts by looking the last tokens up in the request's own text.

    Args:
        num_drafts: Most tokens of a draft.
        min_length: Fewest last tokens that must match.
        max_length: Most last tokens that are compared.
    """

    reads_all_rows: ClassVar[bool] = False

    def __init__(self, num_drafts: int, min_length: int, max_length: int) -> None:
        self._num_drafts = num_drafts
        self._min_length = min_length
        self._back = np.arange(max_length)

    @property
    def max_length(self) -> int:
        """Most last tokens that are compared."""
        return len(self._back)

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Draft for the sampled requests; nothing but their tokens is looked at."""
        return [
            self.find(state.get_tokens(0, state.num_tokens)) if count else []
            for state, count in zip(step.requests, step.sampled_counts, strict=True)
        ]

    def forget(self, block_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept of blocks."""

    def find(self, tokens: np.ndarray) -> list[int]:
        """Return what followed the longest earlier match of the last tokens ``[L]``."""
        return list(self.match(tokens).tokens)

    def match(self, tokens: np.ndarray) -> Draft:
        """Return the same, with the length of the match and what other places say."""
        num_tokens = len(tokens)
        if num_tokens <= self._min_length:
            return Draft((), 0)
        # Indices where a match of the suffix ends; the suffix itself does not count.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        if not len(ends):
            return Draft((), 0)
        lengths = self._measure(tokens, ends)
        length = int(lengths.max())
        if length < self._min_length:
            return Draft((), 0)
        ends = ends[lengths == length]
        full = ends[ends + self._num_drafts < num_tokens]
        # Where all end too soon, the earliest goes on for longest.
        ends, agreement = _choose(tokens, full) if len(full) else (ends[:1], Agreement.ONE)
        start = int(ends[-1]) + 1
        drafted = tokens[start : start + self._num_drafts].tolist()
        return Draft(drafted, length, start, agreement=agreement)

    def _measure(self, tokens: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return how many of the last tokens match at each place, as far as they are compared."""
        num_tokens = len(tokens)
        back = self._back[: num_tokens - 1]
        places = ends[:, None] - back
        differs = tokens[places] != tokens[num_tokens - 1 - back]
        if ends[0] < len(back) - 1:
            # Before the text there is nothing.
            differs |= places < 0
        lengths: np.ndarray = differs.argmax(1)
        lengths[~differs.any(1)] = len(back)
        return lengths

    def is_whole(self, passage: Passage, num_tokens: int) -> bool:
        """Whether a passage was repeated for as long as places are compared, and goes on."""
        return passage.match >= len(self._back) and passage.start < num_tokens

    def resume(self, tokens: np.ndarray, passage: Passage) -> Draft:
        """Return what follows in a passage that was repeated so far, perhaps but for a token."""
        start = passage.start
        return Draft(
            tokens[start : start + self._num_drafts].tolist(), passage.match, start, is_resumed=True
        )


def _choose(tokens: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, Agreement]:
    """Return the places that go on as most do; all of them, if none do so more often."""
    if len(ends) == 1:
        return ends, Agreement.ONE
    following = tokens[ends[-_MOST_PLACES:] + 1].tolist()
    ranked = Counter(following).most_common(2)
    if len(ranked) == 1:
        return ends, Agreement.ALL
    (token, count), (_, next_count) = ranked
    if count == next_count:
        # The latest says most.
        return ends, Agreement.NONE
    return ends[tokens[ends + 1] == token], Agreement.MOST


class WeighedNgramProposer:
    """Drafts as many looked-up tokens as pay: what a step costs is measured from one to the next.

    They are looked up in the request's own text, and in an earlier one that begins like it.

    Args:
        lookup: Looks the tokens up.
        clock: Seconds, never going back.
        most_requests: Of a step that drafts; None: any number.
    """

    reads_all_rows: ClassVar[bool] = False

    def __init__(
        self,
        lookup: NgramProposer,
        clock: Callable[[], float] = time.perf_counter,
        most_requests: int | None = None,
    ) -> None:
        self._lookup = lookup
        self._most_requests = most_requests
        self._clock = clock
        self._weigher = DraftWeigher()
        self._earlier = EarlierTexts(lookup.max_length)
        # When the last step was drafted for, and whose tokens it had.
        self._last_time = 0.0
        self._last_names: frozenset[str] = frozenset()
        self._last_lengths: dict[str, int] = {}
        # Tokens that the last look drafted, seconds that drafts saved and looks took, and steps
        # since the last look.
        self._num_drafted, self._balance, self._num_passed = 0, 0.0, 0

    def propose(
        self, step: StepInput, streams: torch.Tensor, rebuilds: Mapping[str, int]
    ) -> list[list[int]]:
        """Draft for the sampled requests as far as it pays."""
        sampled = [
            state for state, count in zip(step.requests, step.sampled_counts, strict=True) if count
        ]
        self._earlier.note(sampled)
        if self._most_requests is not None and len(step.requests) > self._most_requests:
            # What passes until the next look is no step's time.
            self._last_names = frozenset()
            return [[] for _ in step.requests]
        begin = self._clock()
        names = [state.req_id for state in step.requests]
        if not self._should_look(step, names):
            self._last_time = self._clock()
            return [[] for _ in names]
        texts, begun = self._read(sampled)
        self._note_step(step, texts, begin)
        passages = begun | self._weigher.note_texts(texts)
        drafts = {name: self._draft(tokens, passages.get(name)) for name, tokens in texts.items()}
        counts = self._weigher.choose(drafts, {name: len(text) for name, text in texts.items()})
        self._num_drafted = sum(counts.values())
        self._last_lengths = {name: len(text) for name, text in texts.items()}
        self._last_time, self._last_names = self._clock(), frozenset(texts)
        taken = self._last_time - begin
        self._balance = max(self._balance - taken, -_MOST_LOOKS * taken)
        return [
            list(drafts[name].tokens[: counts[name]]) if name in drafts else [] for name in names
        ]

    def forget(self, block_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept of blocks."""

    def _should_look(self, step: StepInput, names: list[str]) -> bool:
        """Whether this step looks: most do not where drafts have not paid for looks."""
        is_same = len(step.sampled_rows) == step.num_tokens and self._last_names == set(names)
        if self._num_drafted or self._balance >= 0 or not is_same:
            return True
        self._num_passed = (self._num_passed + 1) % _LOOK_STEPS
        return self._num_passed == 0

    def _read(
        self, requests: Sequence[RequestState]
    ) -> tuple[dict[str, np.ndarray], dict[str, Passage]]:
        """Return the texts to look up in, and of those that only repeat an earlier one where."""
        texts, begun = {}, {}
        for state in requests:
            tokens = state.get_tokens(0, state.num_tokens)
            earlier = self._earlier.find(state)
            if earlier is None:
                texts[state.req_id] = tokens
                continue
            texts[state.req_id] = np.concatenate((earlier.tokens, tokens))
            if len(tokens) == earlier.shared:
                begun[state.req_id] = Passage(earlier.start, earlier.shared, is_lost=False)
        return texts, begun

    def _draft(self, tokens: np.ndarray, passage: Passage | None) -> Draft:
        """Look a text's last tokens up, unless the passage that was repeated before goes on.

        It does where it matched for as long as places are compared. Where a lookup finds little, it
        may, too.
        """
        if passage is not None and self._lookup.is_whole(passage, len(tokens)):
            return self._lookup.resume(tokens, passage)
        draft = self._lookup.match(tokens)
        if passage is None or draft.match >= _SURE_MATCH or passage.start >= len(tokens):
            return draft
        if passage.is_lost and draft.tokens:
            return draft
        return self._lookup.resume(tokens, passage)

    def _note_step(self, step: StepInput, texts: Mapping[str, np.ndarray], end: float) -> None:
        """Take note of a step of the same requests, in a row: nothing but decodes."""
        num_rows, num_requests = len(step.sampled_rows), len(texts)
        if not texts or not self._last_names.issuperset(texts) or num_rows != step.num_tokens:
            return
        costs = self._weigher.costs
        costs.note(num_rows, end - self._last_time)
        self._balance *= _KEPT
        if self._num_drafted:
            # This look follows that step: what it brought is what drafts did.
            tokens = sum(len(text) - self._last_lengths[name] for name, text in texts.items())
            alone = costs.estimate(num_requests)
            self._balance += tokens / num_requests * alone - costs.estimate(num_rows)
