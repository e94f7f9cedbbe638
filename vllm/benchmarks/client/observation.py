"""What the client saw of one request."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Usage:
    """What the server said of a request's tokens; None: it did not say.

    Attributes:
        prompt_tokens: Of the prompt.
        completion_tokens: Of the answer.
        cached_tokens: Of the prompt, not computed.
        miss_tokens: The others by reason.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    miss_tokens: dict[str, int] | None = None


@dataclass(slots=True)
class Observation:
    """One request as the client saw it. Times in seconds.

    Attributes:
        start_s: When it was sent, from the start of the run.
        queue_s: How long it waited in the client for ``--max-concurrency``.
        turn: Its turn or round, if the dataset has any.
        num_prompt_tokens: By the server, else by the client.
        num_output_tokens: By the server, else a chunk is a token.
        num_wanted_tokens: Asked for.
        chunk_s: When each chunk with tokens came, from ``start_s``.
        latency_s: Until the stream ended.
        text: The answer.
        usage: What the server said.
        error: Why it failed; empty: it did not.
        request_id: As the server named it.
    """

    start_s: float = 0.0
    queue_s: float = 0.0
    turn: int | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_wanted_tokens: int = 0
    chunk_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    text: str = ""
    usage: Usage = field(default_factory=Usage)
    error: str = ""
    request_id: str = ""

    @property
    def success(self) -> bool:
        """Whether a whole answer came."""
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_s[0] if self.chunk_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Times between chunks that carry tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 of an answer of one token."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)
