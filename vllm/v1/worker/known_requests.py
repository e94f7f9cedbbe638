"""All requests a worker knows, brought up to date by each step's SchedulerOutput."""

import numpy as np

from vllm.exceptions import InvariantError
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.sample.counter_rng import make_key
from vllm.v1.worker.request_pictures import RequestPictures
from vllm.v1.worker.request_state import RequestState


class KnownRequests:
    """The worker's copy of the scheduler's requests.

    Args:
        num_groups: KV groups.
        seed: Of the keys of requests without a seed of their own.

    Owns: every RequestState.
    """

    def __init__(self, num_groups: int, seed: int) -> None:
        self._num_groups = num_groups
        self._states: dict[str, RequestState] = {}
        self._key_source = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._states)

    def get(self, req_id: str) -> RequestState:
        """Return a request's state.

        Raises:
            InvariantError: The worker was never told of it.
        """
        state = self._states.get(req_id)
        if state is None:
            raise InvariantError(f"request {req_id} is scheduled, but this worker never saw it")
        return state

    def update(self, output: SchedulerOutput) -> None:
        """Apply one step's news: finished, preempted, new, continued and resumed requests."""
        for req_id in output.finished_req_ids:
            self._states.pop(req_id, None)
        for req_id in output.preempted_req_ids or ():
            if req_id in self._states:
                self._states[req_id].tables.clear()
        for new in output.scheduled_new_reqs:
            self._add(new)
        self._continue(output.scheduled_cached_reqs)
        for req_id, tables in output.window_tables.items():
            # Tables may still be listed for a request that this very step finished.
            if req_id in self._states:
                self._states[req_id].tables.replace_windows(tables)

    def _add(self, new: NewRequestData) -> None:
        params = new.sampling_params
        if params is None or new.prompt_token_ids is None:
            raise InvariantError(
                f"request {new.req_id} has no sampling parameters or no prompt tokens; this worker "
                "serves text generation"
            )
        known = self._states.get(new.req_id)
        if known is not None:
            # Resumed after a preemption: its draws and its reported rows go on where they were.
            rng_key = known.sampling.rng_key
        elif params.seed is not None:
            rng_key = make_key(params.seed)
        else:
            rng_key = int(self._key_source.integers(2**64, dtype=np.uint64))
        state = RequestState(
            new.req_id,
            new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids,
            len(new.prompt_token_ids),
            params,
            rng_key,
            self._num_groups,
            new.pooling_params,
            RequestPictures.from_data(new),
        )
        state.text_owner = new.text_owner
        state.num_cached_tokens = new.num_computed_tokens
        if known is not None:
            state.num_cached_tokens = known.num_cached_tokens
            state.num_pooled = known.num_pooled
            state.num_prompt_logprobs = known.num_prompt_logprobs
        state.num_computed_tokens = new.num_computed_tokens
        state.tables.replace_all(new.block_ids)
        self._states[new.req_id] = state

    def _continue(self, cached: CachedRequestData) -> None:
        for i, req_id in enumerate(cached.req_ids):
            state = self.get(req_id)
            state.num_computed_tokens = cached.num_computed_tokens[i]
            all_token_ids = cached.all_token_ids.get(req_id)
            if all_token_ids is not None:
                state.set_tokens(all_token_ids)
            num_tokens = state.num_prompt_tokens + cached.num_output_tokens[i]
            num_unseen = num_tokens - state.num_tokens
            if num_unseen > 0 and cached.new_token_ids:
                # Sampled by another worker (pipeline stages before the last one).
                state.append_tokens(cached.new_token_ids[i][-num_unseen:])
            state.match_num_tokens(num_tokens)
            block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert block_ids is not None, f"request {req_id} resumes without blocks"
                state.tables.replace_all(block_ids)
            elif block_ids is not None:
                state.tables.append_all(block_ids)
