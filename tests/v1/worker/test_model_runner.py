"""ModelRunner: random schedules against a plain recomputation, and its corner cases."""

import random

import numpy as np
import pytest
import torch

from tests.v1.worker.fakes import (
    VOCAB,
    RandomScheduler,
    SimRequest,
    as_logprobs,
    greedy_oracle,
    make_runner,
)
from vllm.exceptions import InvariantError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.values.cache_step import RowBounds, WindowTable


def run_until_done(
    scheduler: RandomScheduler, runner, *, num_tokens: int, preempt_share: float = 0.0
) -> dict[str, list[int]]:
    done: dict[str, list[int]] = {}
    for _ in range(2000):
        if not scheduler.requests:
            return done
        for request in list(scheduler.requests.values()):
            is_running = request.is_known and not request.is_preempted
            if is_running and scheduler.rng.random() < preempt_share:
                scheduler.preempt(request)
        out = scheduler.schedule()
        scheduler.update(out, runner.execute_model(out))
        for request in list(scheduler.requests.values()):
            if len(request.output) >= num_tokens:
                done[request.req_id] = request.output[:num_tokens]
                scheduler.finish(request)
    raise AssertionError("the schedule did not end")


def make_requests(rng: random.Random, count: int, **params) -> list[SimRequest]:
    return [
        SimRequest(
            f"r{i}",
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            SamplingParams(max_tokens=100, **params),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_equal_plain_recomputation(seed: int) -> None:
    rng = random.Random(seed)
    runner, _, _ = make_runner()
    scheduler = RandomScheduler(rng, 400, new_on_resume=seed % 2 == 0)
    requests = make_requests(rng, 6, temperature=0.0)
    expected = {r.req_id: greedy_oracle(r.prompt, 12) for r in requests}
    for request in requests:
        scheduler.add(request)
    if seed % 3:
        scheduler.oracle_drafts = lambda r: greedy_oracle(r.tokens, 3)
    share = 0.05 if seed % 4 else 0.0
    assert run_until_done(scheduler, runner, num_tokens=12, preempt_share=share) == expected


def run_seeded(order_seed: int, *, alone: bool, drafts: bool = False) -> dict[str, list[int]]:
    rng = random.Random(7)
    requests = make_requests(rng, 5, temperature=1.3, top_p=0.9)
    for i, request in enumerate(requests):
        request.params.seed = 100 + i
    outputs: dict[str, list[int]] = {}
    batches = [[r] for r in requests] if alone else [requests]
    for batch in batches:
        runner, _, _ = make_runner(seed=order_seed)
        scheduler = RandomScheduler(random.Random(order_seed), 400, new_on_resume=False)
        if drafts:
            scheduler.oracle_drafts = lambda r: greedy_oracle(r.tokens, 3)
        for request in batch:
            scheduler.add(request)
        outputs |= run_until_done(
            scheduler, runner, num_tokens=10, preempt_share=0.0 if alone else 0.05
        )
    return outputs


def test_seeded_answers_do_not_depend_on_the_batch() -> None:
    alone = run_seeded(0, alone=True)
    for order_seed in (1, 2, 3):
        assert run_seeded(order_seed, alone=False) == alone
    # Drafts change how many tokens a step yields, not which.
    assert run_seeded(4, alone=False, drafts=True) == alone


def test_unseeded_answers_differ_between_requests() -> None:
    runner, _, _ = make_runner()
    scheduler = RandomScheduler(random.Random(0), 400, new_on_resume=False)
    for i in range(4):
        scheduler.add(SimRequest(f"r{i}", [1, 2, 3], SamplingParams(max_tokens=50)))
    outputs = run_until_done(scheduler, runner, num_tokens=12)
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4


def new_request(req_id: str, prompt: list[int], **params) -> NewRequestData:
    return NewRequestData(
        req_id, prompt, [], SamplingParams(**params), None, ([1, 2, 3, 4], []), 0, None
    )


def first_step(request: NewRequestData, num_tokens: int) -> SchedulerOutput:
    out = SchedulerOutput.make_empty()
    out.scheduled_new_reqs = [request]
    out.num_scheduled_tokens = {request.req_id: num_tokens}
    out.total_num_scheduled_tokens = num_tokens
    out.window_tables = {request.req_id: (WindowTable(1, 0, list(range(10, 18))),)}
    return out


def next_step(
    out: SchedulerOutput, req_id: str, computed: int, num_tokens: int, num_output: int
) -> None:
    cached = out.scheduled_cached_reqs
    cached.req_ids.append(req_id)
    cached.new_token_ids.append([])
    cached.new_block_ids.append(None)
    cached.num_computed_tokens.append(computed)
    cached.num_output_tokens.append(num_output)
    out.num_scheduled_tokens[req_id] = num_tokens
    out.total_num_scheduled_tokens += num_tokens


def test_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    runner, model, _ = make_runner()
    result = runner.execute_model(first_step(new_request("a", [1] * 8), 5))
    assert result.sampled_token_ids == [[]]
    assert result.logprobs is None
    assert model.logit_rows == []


def test_bounds_of_what_is_written_reach_the_metadata_and_default_to_everything() -> None:
    runner, model, _ = make_runner()
    out = first_step(new_request("a", [1] * 8), 5)
    out.row_bounds = {"a": RowBounds(write_from=(4, 0), read_from=0)}
    runner.execute_model(out)
    assert [part.write_from for part in model.last_slices] == [(4, 0)]
    out = SchedulerOutput.make_empty()
    next_step(out, "a", 5, 2, 0)
    runner.execute_model(out)
    assert [(part.write_from, part.read_from) for part in model.last_slices] == [((), 0)]


def test_step_without_tokens_runs_copies_and_forgets_finished_requests() -> None:
    runner, model, pool = make_runner()
    runner.execute_model(first_step(new_request("a", [1, 2, 3]), 3))
    before = pool.tensors[0].clone()
    assert before[1].any()
    out = SchedulerOutput.make_empty()
    out.finished_req_ids = {"a"}
    out.new_block_ids_to_zero = [10]
    out.kv_cache_block_copies = [(1, 30)]
    result = runner.execute_model(out)
    assert result.req_ids == []
    assert model.num_calls == 1
    assert torch.equal(pool.tensors[0][30], before[1])
    assert not pool.tensors[0][10].any()
    assert runner.num_requests == 0


def test_copies_run_before_the_forward_pass() -> None:
    """A request whose first rows live in a copied block reads what the donor wrote."""
    runner, _, _ = make_runner()
    prompt = [3, 1, 4, 1, 5, 9]
    runner.execute_model(first_step(new_request("a", prompt), 6))
    sibling = new_request("b", prompt, temperature=0.0)
    sibling.num_computed_tokens = 5
    sibling.block_ids = ([20, 21], [])
    out = first_step(sibling, 1)
    out.window_tables = {"b": (WindowTable(1, 0, [10, 11, 22]),)}
    out.kv_cache_block_copies = [(1, 20), (2, 21), (12, 22)]
    assert runner.execute_model(out).sampled_token_ids == [greedy_oracle(prompt, 1)]


def test_logprobs_are_raw_and_rows_follow_requests() -> None:
    runner, _, _ = make_runner()
    a = new_request("a", [1, 2, 3], temperature=1.7, top_k=2, seed=5, logprobs=3)
    result = runner.execute_model(first_step(a, 3))
    assert result.logprobs is not None
    token = result.sampled_token_ids[0][0]
    expected = as_logprobs([1, 2, 3])[-1]
    assert result.logprobs.logprob_token_ids[0, 0] == token
    assert result.logprobs.logprobs[0, 0] == pytest.approx(expected[token], abs=1e-6)
    assert result.logprobs.logprob_token_ids[0, 1:].tolist() == np.argsort(-expected)[:3].tolist()
    rank = 1 + int((expected > expected[token]).sum())
    assert result.logprobs.sampled_token_ranks[0] == rank
    assert result.logprobs.cu_num_generated_tokens == [0, 1]


def test_logprobs_of_rejected_drafts_are_dropped() -> None:
    runner, _, _ = make_runner()
    prompt = [5, 6, 7]
    answer = greedy_oracle(prompt, 4)
    runner.execute_model(first_step(new_request("a", prompt, temperature=0.0, logprobs=1), 3))
    out = SchedulerOutput.make_empty()
    next_step(out, "a", 3, 3, 1)
    out.scheduled_spec_decode_tokens = {"a": [answer[1], (answer[2] + 1) % VOCAB]}
    result = runner.execute_model(out)
    assert result.sampled_token_ids == [answer[1:3]]
    assert result.logprobs is not None
    assert result.logprobs.logprob_token_ids[:, 0].tolist() == answer[1:3]
    assert result.logprobs.cu_num_generated_tokens == [0, 2]


def test_min_tokens_counts_the_tokens_of_the_answer() -> None:
    runner, _, _ = make_runner()
    prompt = [5, 6, 7]
    first, second = greedy_oracle(prompt, 2)
    assert first != second
    params = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": [second]}
    assert runner.execute_model(first_step(new_request("a", prompt, **params), 3)) is not None
    out = SchedulerOutput.make_empty()
    next_step(out, "a", 3, 1, 1)
    assert runner.execute_model(out).sampled_token_ids == [[second]]
    params = {"temperature": 0.0, "min_tokens": 1, "stop_token_ids": [first]}
    result = make_runner()[0].execute_model(first_step(new_request("a", prompt, **params), 3))
    assert result.sampled_token_ids[0] != [first]


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1, 1, 7], [8, 1]])
@pytest.mark.parametrize("count", [0, 2, -1])
def test_prompt_logprobs_cover_the_prompt_once(chunks: list[int], count: int) -> None:
    runner, _, _ = make_runner()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    request = new_request("a", prompt, prompt_logprobs=count)
    rows = []
    computed = 0
    for i, num_tokens in enumerate(chunks):
        if i == 0:
            out = first_step(request, num_tokens)
        else:
            out = SchedulerOutput.make_empty()
            next_step(out, "a", computed, num_tokens, 0)
        computed += num_tokens
        found = runner.execute_model(out).prompt_logprobs_dict
        if "a" in found:
            rows.append(found["a"])
    ids, values, ranks = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    expected = as_logprobs(prompt)[:-1]
    k = VOCAB if count == -1 else count
    assert ids.shape == values.shape == (8, k + 1)
    assert ids[:, 0].tolist() == prompt[1:]
    for i in range(8):
        np.testing.assert_allclose(values[i], expected[i][ids[i]], atol=1e-6)
        assert ids[i, 1:].tolist() == np.argsort(-expected[i])[:k].tolist()
        assert ranks[i] == 1 + (expected[i] > expected[i][prompt[i + 1]]).sum()


def test_prompt_logprobs_are_not_reported_again_after_a_preemption() -> None:
    runner, _, _ = make_runner()
    request = new_request("a", [1, 2, 3, 4], prompt_logprobs=0)
    first = runner.execute_model(first_step(request, 3)).prompt_logprobs_dict["a"]
    assert len(first.ranks) == 3
    again = first_step(request, 4)
    again.preempted_req_ids = {"a"}
    assert runner.execute_model(again).prompt_logprobs_dict == {}


def test_scheduler_and_worker_must_agree_on_tokens() -> None:
    runner, _, _ = make_runner()
    with pytest.raises(InvariantError, match="up to position 4"):
        runner.execute_model(first_step(new_request("a", [1, 2, 3]), 4))
    out = SchedulerOutput.make_empty()
    next_step(out, "ghost", 0, 1, 0)
    with pytest.raises(InvariantError, match="ghost"):
        runner.execute_model(out)
    runner.execute_model(first_step(new_request("b", [1, 2, 3]), 2))
    out = SchedulerOutput.make_empty()
    next_step(out, "b", 2, 1, 2)
    with pytest.raises(InvariantError, match="counts 5 tokens"):
        runner.execute_model(out)


def test_tokens_the_scheduler_cut_are_forgotten() -> None:
    runner, _, _ = make_runner()
    prompt = [5, 6, 7]
    answer = greedy_oracle(prompt, 4)
    runner.execute_model(first_step(new_request("a", prompt, temperature=0.0), 3))
    out = SchedulerOutput.make_empty()
    next_step(out, "a", 3, 3, 1)
    out.scheduled_spec_decode_tokens = {"a": answer[1:3]}
    assert runner.execute_model(out).sampled_token_ids == [answer[1:4]]
    # The scheduler kept one of the three: the next step computes from there again.
    out = SchedulerOutput.make_empty()
    next_step(out, "a", 4, 1, 2)
    assert runner.execute_model(out).sampled_token_ids == [[answer[2]]]
