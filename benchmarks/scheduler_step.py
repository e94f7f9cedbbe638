"""What the scheduler takes of a step with many running requests, in microseconds of processor time.

    python -m benchmarks.scheduler_step [--requests 256] [--steps 200]

Requests with prompts of 512 tokens decode together over DeepSeek-V4's groups, hits at units of 32.
``schedule`` decides a step, ``update`` gives every request its token. One JSON line.
"""

import argparse
import gc
import time

from benchmarks.result import percentiles, print_result
from tests.v1.core.sched.builders import answer, make_request, make_v4_scheduler
from vllm.v1.core.sched.scheduler import Scheduler

PROMPT_LEN = 512
UNIT = 32


def make_running(num_requests: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose requests have all computed their prompts."""
    scheduler = make_v4_scheduler(
        200_000,
        UNIT,
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * PROMPT_LEN,
        log_stats=False,
    )
    params = {"ignore_eos": True}
    for i in range(num_requests):
        prompt = range(i * PROMPT_LEN, (i + 1) * PROMPT_LEN)
        scheduler.add_request(
            make_request(f"r{i}", prompt, num_steps + 100, block_size=UNIT, params=params)
        )
    run_step(scheduler)
    assert len(scheduler.running) == num_requests
    return scheduler


def run_step(scheduler: Scheduler) -> tuple[float, float]:
    """Run a step; returns the microseconds of its two halves."""
    begin = time.thread_time_ns()
    step = scheduler.schedule()
    scheduled = time.thread_time_ns()
    result = answer(step, {request_id: [7] for request_id in step.num_scheduled_tokens})
    answered = time.thread_time_ns()
    scheduler.update_from_output(step, result)
    end = time.thread_time_ns()
    return (scheduled - begin) / 1000, (end - answered) / 1000


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    scheduler = make_running(args.requests, args.steps)
    gc.collect()
    gc.freeze()
    halves = [run_step(scheduler) for _ in range(args.steps)]
    values = {
        "schedule": percentiles([schedule for schedule, _ in halves]),
        "update": percentiles([update for _, update in halves]),
        "both": percentiles([sum(pair) for pair in halves]),
    }
    config = {"requests": args.requests, "unit": "microseconds", "n": args.steps}
    print_result("scheduler_step", config, values)


if __name__ == "__main__":
    main()
