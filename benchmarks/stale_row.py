"""What is a drafter's stale row worth? Acceptance after a hit where continuations part.

    python -m benchmarks.stale_row [--drafts 3] [--cases 60] [--steps 24]

A tiny model of DeepSeek-V4's architecture whose MTP block is right most of the time (constructed,
not trained: ``benchmarks/tiny_checkpoint.py``) serves a prompt, and then prompts that leave it at
the end of a unit. For each of the three answers to the row that the other token made: hit tokens,
the accepted length of the first steps after the hit, how many drafts differ from those of a fresh
computation, and whether the answers are the same.
Prints a markdown table and one JSON line.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.result import print_result
from benchmarks.tiny_checkpoint import VOCAB_SIZE, make_tensors, tiny_config, write_checkpoint
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.values.cache_settings import StaleRow
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

UNIT = 32
MAX_LEN = 600
FIRST_STEPS = 4


@dataclass
class Tally:
    """What one answer to the stale row gave.

    Attributes:
        first: (steps, accepted draft tokens) of the first steps of requests after their hit.
        later: The same of later steps.
        answers: All tokens, to compare.
        drafts: (case, tokens known) -> what was drafted after them.
    """

    hit_tokens: int = 0
    first: list[int] = field(default_factory=lambda: [0, 0])
    later: list[int] = field(default_factory=lambda: [0, 0])
    answers: list[list[int]] = field(default_factory=list)
    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)


def make_core(folder: Path, num_drafts: int, stale_row: StaleRow) -> EngineCore:
    """Build an engine on the checkpoint."""
    speculative = SpeculativeConfig.from_dict(
        {"method": "mtp", "num_speculative_tokens": num_drafts, "stale_row": str(stale_row)}
    )
    config = VllmConfig(
        model_config=ModelConfig(
            "tiny", path=str(folder), hf_config=tiny_config(), max_model_len=MAX_LEN
        ),
        cache_config=CacheConfig(block_size=UNIT, num_gpu_blocks_override=2000),
        scheduler_config=SchedulerConfig(max_model_len=MAX_LEN, max_num_batched_tokens=1024),
        speculative_config=speculative,
    )
    return EngineCore(config, UniProcExecutor)


def serve(
    core: EngineCore, name: str, prompt: list[int], max_tokens: int
) -> tuple[list[EngineCoreOutput], dict[int, list[int]]]:
    """Serve one request alone; returns its outputs, one a step, and drafts by known tokens."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    core.add_request(core.make_request(EngineCoreRequest(name, prompt, params, time.time())))
    outputs: list[EngineCoreOutput] = []
    drafts: dict[int, list[int]] = {}
    while core.has_work():
        for batch in core.step()[0].values():
            outputs += batch.outputs
        for request in core.scheduler.requests.values():
            drafts[request.num_tokens] = list(request.spec_token_ids)
    return outputs, drafts


def measure(folder: Path, stale_row: StaleRow, num_drafts: int, cases: int, steps: int) -> Tally:
    """Serve the same traffic under one answer to the stale row."""
    rng = random.Random(0)
    core = make_core(folder, num_drafts, stale_row)
    tally = Tally()
    for case in tqdm(range(cases), desc=stale_row, disable=None):
        shared = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 12) * UNIT)]
        serve(core, f"{case}", [*shared, 1, 2], 4)
        # The tokens that follow differ from those before: 3 and a few more.
        own = [3, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 3)))]
        outputs, drafts = serve(core, f"{case} parted", [*shared, *own], steps)
        tally.drafts |= {(case, known): draft for known, draft in drafts.items()}
        verified = [output for output in outputs if output.num_draft_tokens]
        for i, output in enumerate(verified):
            counts = tally.first if i < FIRST_STEPS else tally.later
            counts[0] += 1
            counts[1] += output.num_accepted_tokens
        stats = outputs[0].prefill_stats
        assert stats is not None
        tally.hit_tokens += stats.num_cached_tokens
        tally.answers.append([token for output in outputs for token in output.new_token_ids])
    core.shutdown()
    return tally


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--steps", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--noise", type=float, default=0.45)
    parser.add_argument("--mtp-noise", type=float, default=0.6)
    args = parser.parse_args(argv)
    values = {}
    answers = []
    print(f"| stale row | hit tokens | length, first {FIRST_STEPS} drafts | later | other drafts |")
    print("|---|--:|--:|--:|--:|")
    fresh: dict[tuple[int, int], list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), tiny_config()
        tensors = make_tensors(config, noise=args.noise, mtp_noise=args.mtp_noise)
        write_checkpoint(folder, config, tensors)
        for stale_row in StaleRow:
            tally = measure(folder, stale_row, args.drafts, args.cases, args.steps)
            first, later = (1 + n / max(1, steps) for steps, n in (tally.first, tally.later))
            fresh = fresh or tally.drafts
            common = fresh.keys() & tally.drafts.keys()
            num_other = sum(fresh[key] != tally.drafts[key] for key in common)
            print(
                f"| {stale_row} | {tally.hit_tokens} | {first:.3f} | {later:.3f} | "
                f"{num_other} of {len(common)} |",
                flush=True,
            )
            values[str(stale_row)] = {
                "hit_tokens": tally.hit_tokens,
                "first_steps": tally.first[0],
                "accepted_length_first": round(first, 4),
                "later_steps": tally.later[0],
                "accepted_length_later": round(later, 4),
                "other_drafts": num_other,
                "drafts": len(common),
            }
            answers.append(tally.answers)
    same = all(other == answers[0] for other in answers)
    print(f"\nSame answers: {same}")
    print_result("stale_row", vars(args), values | {"same_answers": same})


if __name__ == "__main__":
    main()
