"""What recording costs a decode step: ``python -m benchmarks.trace_overhead``.

32 requests decode in a scheduler that records and in one that does not, without a model, turn by
turn; the difference is set against the time of a decode step of the embedded model at batch 32
(``--step-ms``, measured with ``vllm bench latency``) and of a device (24 ms). One JSON line.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.result import percentiles, print_result
from vllm.cachelab.sim.settings import SimSettings, find_hf_config
from vllm.config.observability import ObservabilityConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.cache_trace import make_scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

_BATCH = 32


def make(path: Path | None) -> Scheduler:
    """Return a scheduler with 32 requests that decode."""
    settings = SimSettings(find_hf_config("v4-flash"), block_size=32, max_model_len=8192)
    config = settings.make_config()
    config.observability_config = ObservabilityConfig(
        log_stats=True, cache_trace=None if path is None else str(path)
    )
    plan = settings.make_plan(config)
    scheduler = make_scheduler(
        config, plan, structured_output_manager=StructuredOutputManager(config)
    )
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(plan.unit, hash_fn)
    params = SamplingParams(max_tokens=7000, ignore_eos=True)
    for i in range(_BATCH):
        prompt = list(range(i, i + 64))
        scheduler.add_request(Request(str(i), prompt, params, block_hasher=hasher))
    for _ in range(4):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Run a step; returns its CPU seconds."""
    begin = time.thread_time()
    plan = scheduler.schedule()
    ids = list(plan.num_scheduled_tokens)
    result = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, [[1] for _ in ids])
    scheduler.update_from_output(plan, result)
    return time.thread_time() - begin


def main() -> None:
    """Measure, alternately, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[24.0])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, recording = make(None), make(Path(folder) / "t.jsonl")
        samples: list[list[float]] = [[], []]
        for _ in range(args.steps):
            for times, scheduler in zip(samples, (plain, recording), strict=True):
                times.append(1e6 * step(scheduler))
        plain.shutdown()
        recording.shutdown()
    medians = [percentiles(times)["p50"] for times in samples]
    extra_us = medians[1] - medians[0]
    values = {
        "plain_us": percentiles(samples[0]),
        "recording_us": percentiles(samples[1]),
        "extra_us": round(extra_us, 2),
        "share_percent": {str(ms): round(extra_us / (10 * ms), 4) for ms in args.step_ms},
    }
    print_result("trace_overhead", {"steps": args.steps, "batch": _BATCH}, values)


if __name__ == "__main__":
    main()
