"""Where the time of decode steps goes, from the front end down to the kernels.

    python -m benchmarks.decode_parts MODEL [--requests 1 16] [--context 8000] [--steps 32]
        [--private] [--kv-cache-dtype float16] [--clock cpu]

Requests that have a prompt in common, or none with ``--private``, decode together in this process,
on as many threads as OMP_NUM_THREADS says. Every moment of a step belongs to one part:

    engine    the front end, the scheduler, and what goes between them and the worker
    worker    the step's inputs, the choice of tokens, what they change
    tables    block tables as the kernels read them
    layers    the model's layers, in one native call
    head      the output matrix

One JSON line for each number of requests: milliseconds of a step, and the parts' shares of it.
"""

import argparse
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.engine import CLOCKS
from benchmarks.result import percentiles, print_result
from vllm import EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.metadata import CacheLayout
from vllm.v1.attention.step_model import StepModel
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.client import InlineCore
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

PARTS = ("engine", "worker", "tables", "layers", "head")
SEED = 3
# Of each prompt, behind what they have in common.
OWN_TOKENS = 16
WARM_STEPS = 4
# Of prompts, at most.
CHUNK = 2048


class Stopwatch:
    """Gives every moment to the part that was entered last and not left.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entered: list[str] = []
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Spend what follows in a part."""
        self._turn()
        self._entered.append(name)
        try:
            yield
        finally:
            self._turn()
            self._entered.pop()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls belong to a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def take(self) -> dict[str, float]:
        """Drain the seconds of each part."""
        spent, self._spent = self._spent, defaultdict(float)
        return spent

    def _turn(self) -> None:
        now = self._clock()
        if self._entered:
            self._spent[self._entered[-1]] += now - self._since
        self._since = now


class TimedModel:
    """A model, whose parts are timed."""

    def __init__(self, model: Any, watch: Stopwatch) -> None:
        self._run = watch.wrap("layers", model)
        self.compute_logits = watch.wrap("head", model.compute_logits)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers."""
        streams: torch.Tensor = self._run(*args, **kwargs)
        return streams


class TimedPlatform(CpuPlatform):
    """The CPU; what its model does is timed."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def make_step_model(
        self,
        model: Any,
        layout: CacheLayout,
        kv_caches: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> StepModel:
        """See ``Platform``."""
        own = super().make_step_model(model, layout, kv_caches, device)
        model = TimedModel(own.model, self._watch)
        build = self._watch.wrap("tables", own.build_metadata)
        return replace(own, model=model, build_metadata=build)


class TimedExecutor(UniProcExecutor):
    """One worker, whose steps are timed."""

    def __init__(self, config: VllmConfig, watch: Stopwatch) -> None:
        super().__init__(config, TimedPlatform(watch))
        self._watch = watch

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See ``Executor``."""
        with self._watch.part("worker"):
            return super().execute_model(scheduler_output)


def make_engine(args: argparse.Namespace, watch: Stopwatch) -> LLMEngine:
    """Return an engine whose steps run in the thread that asks for them."""
    length = args.context + OWN_TOKENS + find_most_tokens(args, max(args.requests))
    config = EngineArgs(
        args.model,
        max_model_len=length,
        max_num_seqs=max(args.requests),
        max_num_batched_tokens=CHUNK,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_cache_memory_bytes=int(args.cache_gib * (1 << 30)),
        skip_tokenizer_init=True,
    ).create_vllm_config()
    config = CpuPlatform().check_and_update_config(config)
    core = InlineCore(lambda: EngineCore(config, partial(TimedExecutor, watch=watch)))
    return LLMEngine(config, core)


def find_most_tokens(args: argparse.Namespace, count: int) -> int:
    """Return how many tokens a request must last for, while others' prompts are computed too."""
    num_chunks = -(-(args.context + OWN_TOKENS) // CHUNK) + 1
    return int(args.steps + 2 * WARM_STEPS + num_chunks * count)


def add_requests(engine: LLMEngine, args: argparse.Namespace, count: int) -> None:
    """Queue requests that decode for longer than is measured."""
    vocab = engine.vllm_config.model_config.hf_config["vocab_size"]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=find_most_tokens(args, count),
        ignore_eos=True,
        detokenize=False,
    )
    rng = random.Random(SEED)
    common = [rng.randrange(300, vocab) for _ in range(args.context)]
    for number in range(count):
        if args.private:
            common = [rng.randrange(300, vocab) for _ in range(args.context)]
        own = [rng.randrange(300, vocab) for _ in range(OWN_TOKENS)]
        engine.add_request(f"{count}-{number}", {"prompt_token_ids": common + own}, params)
        if number == 0:
            # What the others have in common with it is in the cache when they come.
            while not engine.step():
                pass


def measure(engine: LLMEngine, args: argparse.Namespace, count: int, watch: Stopwatch) -> None:
    """Time steps of some requests and print a JSON line."""
    add_requests(engine, args, count)
    # Prompts end in their own time; from then on every step has a token of each.
    while len(engine.step()) < count:
        pass
    for _ in range(WARM_STEPS):
        engine.step()
    steps = []
    for _ in range(args.steps):
        watch.take()
        with watch.part("engine"):
            engine.step()
        steps.append({name: 1e3 * seconds for name, seconds in watch.take().items()})
    engine.abort_request([f"{count}-{number}" for number in range(count)])
    while engine.has_unfinished_requests():
        engine.step()
    parts = {name: percentiles([step.get(name, 0.0) for step in steps]) for name in PARTS}
    whole = percentiles([sum(step.values()) for step in steps])
    shares = {name: round(part["p50"] / whole["p50"], 4) for name, part in parts.items()}
    config = {
        "model": os.path.basename(args.model),
        "requests": count,
        "context": args.context,
        "private": args.private,
        "kv_cache_dtype": args.kv_cache_dtype,
        "clock": args.clock,
        "threads": torch.get_num_threads(),
        "seed": SEED,
        "n": args.steps,
    }
    print_result("decode_parts", config, {"step_ms": whole, "parts_ms": parts, "shares": shares})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--cache-gib", type=float, default=4)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    args = parser.parse_args()
    watch = Stopwatch(CLOCKS[args.clock])
    engine = make_engine(args, watch)
    for count in args.requests:
        measure(engine, args, count, watch)


if __name__ == "__main__":
    main()
