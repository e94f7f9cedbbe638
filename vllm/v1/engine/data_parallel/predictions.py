"""What a router foretold of the last requests, for whoever asks why one hit what it hit."""

from collections.abc import Iterable

import msgspec

from vllm.v1.engine.last_requests import LastRequests
from vllm.v1.messages import EngineCoreOutput


class Prediction(msgspec.Struct, frozen=True):
    """A hit as it was foretold, and how it came out.

    Attributes:
        predicted_tokens: Foretold when the request was sent to its core.
        cached_tokens: That came.
        outcome: "exact", or why they differ (``Router``).
        core: The data parallel rank that had it.
    """

    predicted_tokens: int
    cached_tokens: int
    outcome: str
    core: int


class Predictions(LastRequests[Prediction]):
    """Their predictions."""

    def note(self, outputs: Iterable[EngineCoreOutput], core: int) -> None:
        """Keep what a step's first outputs tell."""
        for output in outputs:
            stats = output.prefill_stats
            if stats is None or stats.predicted_tokens is None:
                continue
            made = Prediction(
                stats.predicted_tokens, stats.num_cached_tokens, stats.prediction, core
            )
            self.keep(output.request_id, made)
