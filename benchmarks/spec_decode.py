"""Accepted length and tokens/s with and without drafts, on the embedded checkpoint.

Its weights are untrained, so MTP drafts are hardly ever right: that row shows the cost of drafting,
not its gain. Usage: ``python -m benchmarks.spec_decode``.
"""

import random
import time
from typing import Any

from vllm.config.engine_args import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.messages import EngineCoreRequest
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def measure(raw: dict[str, Any] | None, num_requests: int, num_tokens: int) -> str:
    """Run repetitive prompts greedily and describe what came out."""
    args = EngineArgs(speculative_config=raw, max_model_len=1024, num_gpu_blocks_override=800)
    core = EngineCore(args.create_vllm_config(), UniProcExecutor)
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(num_requests):
        prompt = [rng.randrange(10, 3000) for _ in range(8)] * 12
        core.add_request(core.make_request(EngineCoreRequest(f"r{i}", prompt, params, time.time())))
    drafts = accepted = 0
    started = time.perf_counter()
    while core.has_work():
        for batch in core.step()[0].values():
            stats = batch.scheduler_stats
            if stats is not None and stats.spec_decoding_stats is not None:
                drafts += stats.spec_decoding_stats.num_drafts
                accepted += stats.spec_decoding_stats.num_accepted_tokens
    rate = num_requests * num_tokens / (time.perf_counter() - started)
    core.shutdown()
    return f"accepted length {1 + accepted / max(drafts, 1):.2f}, {rate:.1f} tokens/s"


def main() -> None:
    """Print one line per drafter."""
    cases: list[tuple[str, dict[str, Any] | None]] = [("none", None), ("ngram k=3", _NGRAM)]
    cases += [
        (f"mtp k={k} (untrained)", {"method": "mtp", "num_speculative_tokens": k}) for k in (1, 4)
    ]
    for name, raw in cases:
        print(f"{name:22} {measure(raw, num_requests=4, num_tokens=100)}", flush=True)


if __name__ == "__main__":
    main()
