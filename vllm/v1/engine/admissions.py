"""How the last requests were admitted, for whoever asks why one hit what it hit."""

from collections.abc import Iterable

from vllm.v1.engine.last_requests import LastRequests
from vllm.v1.messages import EngineCoreOutput, PrefillStats


class Admissions(LastRequests[PrefillStats]):
    """Their records."""

    def note(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Keep what a step's first outputs tell."""
        for output in outputs:
            if output.prefill_stats is not None:
                self.keep(output.request_id, output.prefill_stats)
