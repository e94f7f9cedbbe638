"""Which functions a server's start and its requests run: a process of its own, profiled.

    python -m tests.served_functions

Serves the embedded model with drafts in one process, under the policy `auto` and under a fixed
interval: long prompts in chunks, a resend, siblings, next turns, in a pool too small for all of
them, with KV events, pins and invariants on. Prints a JSON object: "start" and "serve", each a list
of "file::qualified name".
"""

import inspect
import json
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (f"{ROOT}/vllm/", f"{ROOT}/vllm_ascend/")
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CHECK_INVARIANTS": "1",
    "VLLM_PIN_SWA_TOKENS": "1",
    "VLLM_PIN_MIN_DROP_SIZE": "4",
}


class Profile:
    """Notes the code that runs, of all threads."""

    def __init__(self) -> None:
        # By its address: a code's own hash is made anew each time, of all that it holds.
        self._seen: dict[int, CodeType] = {}
        # A tracer hears of calls alone where it asks for no lines; a profiler of returns, and of
        # the calls of C functions, too.
        threading.settrace(self._note)
        sys.settrace(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        self._seen[id(code)] = code

    def take(self) -> list[str]:
        """Return and forget the names of the functions seen: no bodies of modules and classes."""
        codes, self._seen = list(self._seen.values()), {}
        return sorted(
            f"{code.co_filename.removeprefix(f'{ROOT}/')}::{code.co_qualname}"
            for code in codes
            if code.co_filename.startswith(PACKAGES) and code.co_flags & inspect.CO_OPTIMIZED
        )


def main() -> None:
    """Serve, and print what ran."""
    os.environ.update(SETTINGS)
    from vllm import LLM

    profile = Profile()
    start: set[str] = set()
    served: set[str] = set()
    for policy in ("auto", "512"):
        with LLM(
            "deepseek-v4",
            block_size=32,
            max_model_len=1536,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=270,
            prefix_cache_retention_interval=policy,
            speculative_config={"method": "mtp", "num_speculative_tokens": 1},
            kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
            use_tqdm_on_load=False,
        ) as llm:
            start |= set(profile.take())
            ask(llm)
            served |= set(profile.take())
    print(json.dumps({"start": sorted(start), "serve": sorted(served)}))


def ask(llm: "LLM") -> None:  # type: ignore[name-defined]  # noqa: F821  (imported when all is set)
    """Ask for what the cache is made for."""
    from vllm import SamplingParams

    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def text(num_tokens: int) -> list[int]:
        return [rng.randrange(200, 2000) for _ in range(num_tokens)]

    def answers(prompts: Sequence[list[int]]) -> list[list[int]]:
        given = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    system = text(400)
    prompts = [system + text(90) for _ in range(3)]
    for _ in range(2):
        said = answers(prompts)
    answers([[*prompts[0], *said[0], *text(20)]])
    for _ in range(2):
        answers([text(1000)])
    answers(prompts[:1])


if __name__ == "__main__":
    main()
