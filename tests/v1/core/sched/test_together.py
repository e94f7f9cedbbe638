"""Prompts that come together: all but the first hit what they share, to the last full unit."""

import random

import pytest

from tests.v1.core.sched.builders import make_request, make_v4_scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

UNIT = 32


def find_hits(scheduler: Scheduler, requests: list[Request]) -> list[int]:
    """Answer requests that are all there before the first step; return what each hit, sorted."""
    hits: list[int] = []
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        ids = list(output.num_scheduled_tokens)
        by_id = {request.request_id: request for request in requests}
        tokens = [[5] if by_id[i].num_computed_tokens >= by_id[i].num_tokens else [] for i in ids]
        order = {request_id: at for at, request_id in enumerate(ids)}
        told = scheduler.update_from_output(output, ModelRunnerOutput(ids, order, tokens))
        outputs = [one for client in told.values() for one in client.outputs]
        hits += [one.prefill_stats.num_cached_tokens for one in outputs if one.prefill_stats]
    return sorted(hits)


@pytest.mark.parametrize("budget", [2048, 8192])
def test_seven_of_eight_hit_what_they_share(budget: int) -> None:
    rng = random.Random(budget)
    scheduler = make_v4_scheduler(
        8000, max_model_len=8192, max_num_batched_tokens=budget, max_num_seqs=16
    )
    for number in range(25):
        length = rng.randint(503, 1503)
        shared = [1000 * (number + 1) + i for i in range(length)]
        requests = [
            make_request(
                f"{number}-{i}",
                [*shared, -i - 1, *range(rng.randint(0, 200))],
                max_tokens=1,
                block_size=UNIT,
            )
            for i in range(8)
        ]
        assert find_hits(scheduler, requests)[1:] == [length // UNIT * UNIT] * 7, length


def test_a_chunk_that_takes_the_whole_step_leaves_what_the_others_share() -> None:
    """The second chunk of the first prompt, tokens 512 to 1023, holds the place at 864."""
    scheduler = make_v4_scheduler(8000, max_model_len=8192, max_num_batched_tokens=512)
    requests = [
        make_request(f"{i}", [*range(874), -i - 1, *range(length - 875)], 1, block_size=UNIT)
        for i, length in enumerate((1059, 921, 991, 1057, 1002, 1054, 1029, 1014))
    ]
    assert find_hits(scheduler, requests) == [0] + [864] * 7


def test_answers_to_one_prompt_hit_all_but_its_end() -> None:
    scheduler = make_v4_scheduler(8000, max_model_len=8192)
    for length in (640, 641, 1000, 1311):
        prompt = [5000 * length + i for i in range(length)]
        requests = [
            make_request(f"{length}-{i}", prompt, max_tokens=1, block_size=UNIT) for i in range(5)
        ]
        assert find_hits(scheduler, requests)[1:] == [(length - 1) // UNIT * UNIT] * 4
