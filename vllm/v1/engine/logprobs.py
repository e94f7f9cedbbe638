"""Log probabilities of one request, with tokens as text."""

from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs, TokenLogprobs
from vllm.tokenizers import Tokenizer
from vllm.v1.messages import LogprobsRows


class LogprobsCollector:
    """Gathers the log probabilities of an answer and of its prompt.

    Owns: both lists. The prompt's starts with None: its first token has no probability.

    Args:
        tokenizer: Turns ids into text; None: no text.
        wants_sample: Whether the answer's are wanted.
        wants_prompt: Whether the prompt's are.
        has_ranks: Whether the tokens beside an answer's own are the most likely ones, best first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        wants_sample: bool,
        wants_prompt: bool,
        has_ranks: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._has_ranks = has_ranks
        self.sample: SampleLogprobs | None = [] if wants_sample else None
        self.prompt: PromptLogprobs | None = [None] if wants_prompt else None
        self.cumulative: float | None = 0.0 if wants_sample else None

    def add_sample(self, rows: LogprobsRows, num_tokens: int) -> None:
        """Add the first ``num_tokens`` rows; the others are past the end of the answer."""
        if self.sample is None or self.cumulative is None:
            return
        for i in range(min(num_tokens, len(rows.ranks))):
            self.sample.append(self._position(rows, i, has_ranks=self._has_ranks))
            self.cumulative += rows.logprobs[i][0]

    def add_prompt(self, rows: LogprobsRows) -> None:
        """Add the positions that a step computed."""
        if self.prompt is not None:
            self.prompt.extend(self._position(rows, i) for i in range(len(rows.ranks)))

    def _position(self, rows: LogprobsRows, i: int, *, has_ranks: bool = True) -> TokenLogprobs:
        """Build one position: the token itself first, then the others in their order."""
        position: TokenLogprobs = {}
        columns = zip(rows.token_ids[i], rows.logprobs[i], strict=True)
        for column, (token_id, logprob) in enumerate(columns):
            if token_id in position:
                continue  # the token itself is among the most likely ones
            rank = column if has_ranks else None
            rank = rows.ranks[i] if column == 0 else rank
            position[token_id] = self._entry(token_id, logprob, rank)
        return position

    def _entry(self, token_id: int, logprob: float, rank: int | None) -> Logprob:
        if self._tokenizer is None:
            return Logprob(logprob, rank)
        token_bytes = self._tokenizer.token_bytes(token_id)
        return Logprob(logprob, rank, token_bytes.decode(errors="replace"), token_bytes)
