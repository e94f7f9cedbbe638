"""What ``benchmarks.race`` times: this engine's process, or the vllm-project's CPU package's:

    python -m benchmarks.race_engine PATH MAX_MODEL_LEN DTYPE CACHE   # this engine
    PYTHON race_engine.py PATH MAX_MODEL_LEN DTYPE CACHE              # that of PYTHON's ``vllm``

CACHE: the KV cache's GiB, then the words "shared" where requests may share what they have in
common, and the type of cached rows where it is not the default.

Reads lines of JSON {kind, prompts, count} and answers each with {cpu_s, wall_s}. Both
packages are named ``vllm`` and have the calls that are made here, so nothing else may be imported.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from vllm import LLM, SamplingParams


def main() -> None:
    """Answers tasks until the input ends."""
    path, max_model_len, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    gib, *words = sys.argv[4].split()
    shared = "shared" in words
    cache_dtype = next((word for word in words if word != "shared"), "auto")
    llm = LLM(
        model=path,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=shared,
        kv_cache_dtype=cache_dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len,
        kv_cache_memory_bytes=int(gib) << 30,
        disable_log_stats=True,
        speculative_config={"method": "none"},
    )

    def spend(task: Mapping[str, Any], num_tokens: int) -> tuple[float, float]:
        """Returns the seconds of processor time and of wall time that a generation takes."""
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in task["prompts"]]
        used, start = time.process_time(), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - used, time.perf_counter() - start

    # By task: the least that its prompts took. A round that was slow there would else make its
    # tokens look fast, and the best round is what is told.
    firsts: dict[tuple[int, ...], tuple[float, float]] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if task["kind"] == "prefill":
            cpu, wall = spend(task, 1)
        else:
            if shared:
                spend(task, 1)
            # The prompt's share is what a generation of one token takes, its rows kept or not.
            name = (task["count"], *map(len, task["prompts"]))
            told = [spend(task, 1), spend(task, 1), firsts.get(name, (math.inf, math.inf))]
            first = firsts[name] = min(cpu for cpu, _ in told), min(wall for _, wall in told)
            last = spend(task, task["count"] + 1)
            cpu, wall = last[0] - first[0], last[1] - first[1]
        print(json.dumps({"cpu_s": cpu, "wall_s": wall}), flush=True)


if __name__ == "__main__":
    main()
