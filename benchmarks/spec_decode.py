"""Accepted length and speed with and without drafts.

    OMP_NUM_THREADS=1 python -m benchmarks.spec_decode [--tokens 100] [--requests 1 4 8]

The embedded checkpoint was trained on lookups and small talk; the prompts here are random tokens,
which its MTP block was not trained to continue. Two kinds of prompts, 96 tokens each: a phrase of
eight tokens said twelve times, whose answer does not repeat itself, and one token said 96 times,
whose answer does. Beside it a tiny model, constructed so that its MTP block is right most of the
time (``benchmarks/tiny_checkpoint.py``), answers random prompts.

One JSON line per number of requests. Speed is in tokens per second of CPU time, which other
processes disturb least; with one thread and a free core it is that of the clock.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import print_result
from benchmarks.tiny_checkpoint import VOCAB_SIZE, make_tensors, tiny_config, write_checkpoint
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreRequest

PROMPT_TOKENS = 96
PHRASES = {"phrase": 8, "one token": 1}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
_MTP = [{"method": "mtp", "num_speculative_tokens": k} for k in (1, 3)]
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram k=3": _NGRAM,
    **{f"mtp k={raw['num_speculative_tokens']}": raw for raw in _MTP},
}


CONSTRUCTED: dict[str, dict[str, Any] | None] = {
    "none": None,
    **{f"mtp k={k}": {"method": "mtp", "num_speculative_tokens": k} for k in (1, 2, 4)},
}
_NOISE = 0.45


def make_core(raw: dict[str, Any] | None, model: str = "deepseek-v4") -> EngineCore:
    """Build an engine in this process."""
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        speculative_config=raw,
        max_model_len=1024,
        num_gpu_blocks_override=1600,
    )
    return EngineCore(args.create_vllm_config(), UniProcExecutor)


def measure(
    core: EngineCore,
    phrase: int,
    num_requests: int,
    num_tokens: int,
    run: str,
    vocab_size: int = 2000,
) -> dict[str, float]:
    """Answer repetitive prompts greedily and describe what it took, prompts left out.

    Args:
        phrase: Tokens of the phrase a prompt repeats.
        run: Distinguishes the request ids of an engine's runs.
        vocab_size: Ids of prompts are below it.
    """
    rng = random.Random(num_requests)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(num_requests):
        prompt = [rng.randrange(10, vocab_size) for _ in range(phrase)] * (PROMPT_TOKENS // phrase)
        request = EngineCoreRequest(f"{run}-{i}", prompt, params, time.time())
        core.add_request(core.make_request(request))
    core.step()
    drafts = accepted = steps = 0
    started = time.process_time()
    while core.has_work():
        steps += 1
        for batch in core.step()[0].values():
            stats = batch.scheduler_stats
            if stats is not None and stats.spec_decoding_stats is not None:
                drafts += stats.spec_decoding_stats.num_drafts
                accepted += stats.spec_decoding_stats.num_accepted_tokens
    seconds = time.process_time() - started
    return {
        "accepted_length": round(1 + accepted / max(drafts, 1), 2),
        "tokens_per_cpu_s": round(num_requests * (num_tokens - 1) / seconds, 1),
        "ms_per_step": round(1e3 * seconds / steps, 2),
    }


def main() -> None:
    """Print one JSON line per number of requests; a drafter's first, small run warms it up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    cores = {name: make_core(raw) for name, raw in DRAFTERS.items()}
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config()
        write_checkpoint(Path(folder), config, make_tensors(config, noise=_NOISE, mtp_noise=_NOISE))
        constructed = {name: make_core(raw, folder) for name, raw in CONSTRUCTED.items()}
    for core in (*cores.values(), *constructed.values()):
        measure(core, 8, 1, 8, "warm-up", VOCAB_SIZE)
    for num_requests in args.requests:
        values = {
            f"{kind}, {name}": measure(core, phrase, num_requests, args.tokens, f"{kind}-{name}")
            for kind, phrase in PHRASES.items()
            for name, core in cores.items()
        }
        values |= {
            f"constructed, {name}": measure(
                core, PROMPT_TOKENS, num_requests, args.tokens, name, VOCAB_SIZE
            )
            for name, core in constructed.items()
        }
        print_result("spec_decode", {"requests": num_requests, "tokens": args.tokens}, values)
    for core in (*cores.values(), *constructed.values()):
        core.shutdown()


if __name__ == "__main__":
    main()
