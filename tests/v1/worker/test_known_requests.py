"""What the worker remembers between steps."""

import pytest

from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.values.cache_step import WindowTable
from vllm.v1.worker.known_requests import KnownRequests


def new(
    req_id: str,
    prompt: list[int] | None,
    *,
    tokens=None,
    seed=None,
    params=True,
    computed=0,
    owner=None,
):
    return NewRequestData(
        req_id,
        prompt,
        [],
        SamplingParams(seed=seed) if params else None,
        None,
        ([1, 2], []),
        computed,
        None,
        prefill_token_ids=tokens,
        text_owner=owner,
    )


def step(*added: NewRequestData) -> SchedulerOutput:
    out = SchedulerOutput.make_empty()
    out.scheduled_new_reqs = list(added)
    return out


def going_on(
    req_id: str,
    *,
    computed: int,
    num_output: int,
    blocks=None,
    new_tokens=(),
    all_tokens=None,
    resumed=False,
) -> SchedulerOutput:
    out = SchedulerOutput.make_empty()
    cached = out.scheduled_cached_reqs
    cached.req_ids = [req_id]
    cached.new_token_ids = [list(new_tokens)]
    cached.new_block_ids = [blocks]
    cached.num_computed_tokens = [computed]
    cached.num_output_tokens = [num_output]
    if all_tokens is not None:
        cached.all_token_ids = {req_id: all_tokens}
    if resumed:
        cached.resumed_req_ids = {req_id}
    return out


def tokens_of(states: KnownRequests, req_id: str) -> list[int]:
    state = states.get(req_id)
    return state.get_tokens(0, state.num_tokens).tolist()


def test_life_of_a_request() -> None:
    states = KnownRequests(2, seed=0)
    out = step(new("a", [5, 6, 7]))
    out.window_tables = {"a": (WindowTable(1, 3, [8]),)}
    states.update(out)
    state = states.get("a")
    assert tokens_of(states, "a") == [5, 6, 7]
    assert [view.block_ids.tolist() for view in state.tables.views] == [[1, 2], [8]]
    state.append_token(9)
    states.update(going_on("a", computed=3, num_output=1, blocks=([4], [])))
    assert state.num_computed_tokens == 3
    assert state.tables.views[0].block_ids.tolist() == [1, 2, 4]
    gone = SchedulerOutput.make_empty()
    gone.preempted_req_ids = {"a"}
    states.update(gone)
    assert [len(view.block_ids) for view in state.tables.views] == [0, 0]
    states.update(going_on("a", computed=0, num_output=1, blocks=([7, 8], [9]), resumed=True))
    assert [view.block_ids.tolist() for view in state.tables.views] == [[7, 8], [9]]
    assert tokens_of(states, "a") == [5, 6, 7, 9]
    end = SchedulerOutput.make_empty()
    end.finished_req_ids = {"a", "never seen"}
    # Tables of a request that ends in the same step are of no use.
    end.window_tables = {"a": (WindowTable(1, 3, [8]),)}
    states.update(end)
    assert len(states) == 0
    with pytest.raises(InvariantError, match="never saw"):
        states.get("a")


def test_resumed_as_a_new_request_keeps_its_answer_and_key() -> None:
    states = KnownRequests(2, seed=0)
    states.update(step(new("a", [5, 6])))
    first = states.get("a")
    first.num_prompt_logprobs = 1
    states.update(step(new("a", [5, 6], tokens=[5, 6, 7, 8])))
    again = states.get("a")
    assert again is not first
    assert tokens_of(states, "a") == [5, 6, 7, 8]
    assert again.num_prompt_tokens == 2
    assert again.sampling.rng_key == first.sampling.rng_key
    assert again.num_prompt_logprobs == 1


def test_what_was_cached_is_what_the_first_admission_found() -> None:
    """A request that resumes finds its own blocks: nobody else's text begins like those."""
    states = KnownRequests(2, seed=0)
    states.update(step(new("a", [5, 6, 7], computed=1, owner="somebody"), new("b", [5, 6, 7])))
    states.update(step(new("a", [5, 6, 7], tokens=[5, 6, 7, 8], computed=3, owner="somebody")))
    states.update(step(new("b", [5, 6, 7], tokens=[5, 6, 7, 8], computed=3)))
    found = [(state.num_cached_tokens, state.text_owner) for state in map(states.get, "ab")]
    assert found == [(1, "somebody"), (0, None)]
    assert states.get("a").num_computed_tokens == 3


def test_keys_come_from_the_request_or_the_engines_seed() -> None:
    def keys(engine_seed: int) -> list[int]:
        states = KnownRequests(2, engine_seed)
        states.update(step(new("a", [1]), new("b", [1]), new("c", [1], seed=3)))
        return [states.get(req_id).sampling.rng_key for req_id in "abc"]

    assert keys(0) == keys(0)
    assert len(set(keys(0))) == 3
    assert keys(1)[:2] != keys(0)[:2]
    assert keys(1)[2] == keys(0)[2]


def test_tokens_from_the_scheduler() -> None:
    states = KnownRequests(2, seed=0)
    states.update(step(new("a", [5, 6])))
    states.update(going_on("a", computed=2, num_output=2, all_tokens=[5, 6, 1, 2]))
    assert tokens_of(states, "a") == [5, 6, 1, 2]
    states.update(going_on("a", computed=3, num_output=3, new_tokens=[2, 3]))
    assert tokens_of(states, "a") == [5, 6, 1, 2, 3]
    states.update(going_on("a", computed=3, num_output=1))
    assert tokens_of(states, "a") == [5, 6, 1]
    with pytest.raises(InvariantError, match="counts 6 tokens, the worker knows 3"):
        states.update(going_on("a", computed=3, num_output=4))


def test_long_answers_outgrow_the_first_array() -> None:
    states = KnownRequests(2, seed=0)
    states.update(step(new("a", [1])))
    state = states.get("a")
    for token in range(500):
        state.append_token(token)
    state.place_drafts([7, 8])
    assert tokens_of(states, "a") == [1, *range(500)]
    assert state.get_tokens(501, 503).tolist() == [7, 8]


@pytest.mark.parametrize("request_data", [new("a", None), new("a", [1], params=False)])
def test_only_text_generation_is_served(request_data: NewRequestData) -> None:
    with pytest.raises(InvariantError, match="text generation"):
        KnownRequests(2, seed=0).update(step(request_data))
