"""Accepted length and tokens/s with and without drafts.

    python -m benchmarks.spec_decode [--requests 4] [--tokens 100]

Three texts: repetitive prompts on the embedded checkpoint, for prompt lookup; the same for MTP,
whose block is **untrained** there, so that its drafts are hardly ever right and the row shows the
cost of drafting, not its gain; and random prompts on a tiny model constructed so that its MTP block
is right most of the time (``benchmarks/tiny_checkpoint.py``). Prints a markdown table, one row for
each drafter beside the same without drafts, and one JSON line.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import print_result
from benchmarks.tiny_checkpoint import VOCAB_SIZE, make_tensors, tiny_config, write_checkpoint
from vllm.config.engine_args import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.messages import EngineCoreRequest
from vllm.v1.executor.uniproc_executor import UniProcExecutor

NOISE = 0.45


@dataclass(frozen=True)
class Case:
    """One text and its drafters.

    Attributes:
        name: For the table.
        model: What ``--model`` takes; None: the constructed checkpoint.
        drafters: Label -> ``--speculative-config``.
        pattern: Tokens that a prompt repeats; 0: random throughout.
    """

    name: str
    model: str | None
    drafters: dict[str, dict[str, Any] | None]
    pattern: int


def mtp(k: int) -> dict[str, Any]:
    """Return the config of k drafts by MTP."""
    return {"method": "mtp", "num_speculative_tokens": k}


_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
_MTPS: dict[str, dict[str, Any] | None] = {f"mtp k={k}": mtp(k) for k in (1, 2, 4)}
CASES = (
    Case(
        "embedded (untrained), repetitive",
        "deepseek-v4",
        {"none": None, "ngram k=3": _NGRAM, **_MTPS},
        pattern=8,
    ),
    Case("constructed, random", None, {"none": None, **_MTPS}, pattern=0),
)


def make_prompts(case: Case, count: int) -> list[list[int]]:
    """Return prompts of 96 tokens."""
    rng = random.Random(0)
    limit = VOCAB_SIZE if case.model is None else 3000
    size = case.pattern or 96
    return [[rng.randrange(10, limit) for _ in range(size)] * (96 // size) for _ in range(count)]


def measure(
    model: str, raw: dict[str, Any] | None, prompts: list[list[int]], num_tokens: int
) -> tuple[float | None, float]:
    """Run prompts greedily side by side; returns accepted length and tokens/s."""
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        speculative_config=raw,
        max_model_len=1024,
        num_gpu_blocks_override=800,
    )
    core = EngineCore(args.create_vllm_config(), UniProcExecutor)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add_request(core.make_request(EngineCoreRequest(f"r{i}", prompt, params, time.time())))
    drafts = accepted = 0
    started = time.perf_counter()
    while core.has_work():
        for batch in core.step()[0].values():
            stats = batch.scheduler_stats
            if stats is not None and stats.spec_decoding_stats is not None:
                drafts += stats.spec_decoding_stats.num_drafts
                accepted += stats.spec_decoding_stats.num_accepted_tokens
    rate = len(prompts) * num_tokens / (time.perf_counter() - started)
    core.shutdown()
    return (1 + accepted / drafts if drafts else None), rate


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args(argv)
    values: dict[str, dict[str, float | None]] = {}
    print("| model and text | drafter | accepted length | tokens/s |\n|---|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config()
        tensors = make_tensors(config, noise=NOISE, mtp_noise=NOISE)
        write_checkpoint(Path(folder), config, tensors)
        for case in CASES:
            prompts = make_prompts(case, args.requests)
            for label, raw in case.drafters.items():
                length, rate = measure(case.model or folder, raw, prompts, args.tokens)
                shown = "-" if length is None else f"{length:.2f}"
                print(f"| {case.name} | {label} | {shown} | {rate:.1f} |", flush=True)
                values[f"{case.name}, {label}"] = {
                    "accepted_length": length and round(length, 3),
                    "tokens_per_s": round(rate, 1),
                }
    print_result("spec_decode", vars(args), values)


if __name__ == "__main__":
    main()
