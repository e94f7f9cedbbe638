"""What a worker reports of prompts that are scored, as far as a scheduler depends on it."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vllm.v1.core.prompt_scores import ScoreRows
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class ScoredPrompts:
    """Rows without a meaning, as many as each step would bring.

    Owns: how many rows were reported of each prompt that is scored.
    """

    def __init__(self) -> None:
        self._num_reported: dict[str, int] = {}

    def rows(self, step: SchedulerOutput, requests: Mapping[str, Request]) -> dict[str, Any]:
        """Return what a step brings, as ``ScoreRows`` by request.

        Args:
            step: As it was scheduled; steps come in their order.
            requests: Those that are alive.
        """
        self._forget(requests)
        scheduled = [requests[name] for name in step.num_scheduled_tokens if name in requests]
        scored = [request for request in scheduled if request.num_scores is not None]
        if not scored:
            return {}
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        found: dict[str, Any] = {}
        for request in scored:
            assert request.num_scores is not None
            request_id = request.request_id
            start = starts[request_id]
            first = max(start, self._num_reported.get(request_id, 0))
            end = start + step.num_scheduled_tokens[request_id]
            end = min(end, request.num_prompt_tokens - 1)
            if first < end:
                found[request_id] = _blank(end - first, request.num_scores + 1)
                self._num_reported[request_id] = end
        return found

    def _forget(self, alive: Collection[str]) -> None:
        for request_id in [name for name in self._num_reported if name not in alive]:
            del self._num_reported[request_id]


def _blank(num_rows: int, num_columns: int) -> ScoreRows:
    shape = (num_rows, num_columns)
    return ScoreRows(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(num_rows, np.int32)
    )
