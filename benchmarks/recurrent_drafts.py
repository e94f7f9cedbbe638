"""What drafts of a recurrent model's own block cost and gain.

    OMP_NUM_THREADS=1 python -m benchmarks.recurrent_drafts [--tokens 64] [--requests 1 4]

A random Qwen 3.5 of eight layers of the widths of the 0.8B (a vocabulary of 8,192), whose block is
right about as often as wrong, answers random prompts of 96 tokens, with and without drafts. One
JSON line per number of requests: accepted length, tokens per second of CPU time, which other
processes disturb least, and milliseconds per step, which do not depend on what is accepted.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.result import print_result
from benchmarks.spec_decode import CONSTRUCTED, PROMPT_TOKENS, make_core, measure
from tests.model_executor.models.decoder.drafting import (
    BlockOracle,
    add_block,
    build_quiet_model,
)
from tests.model_executor.models.decoder.reference import qwen3_5

CONFIG = qwen3_5(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
)


def write_checkpoint(folder: Path) -> None:
    """Write the model and its block."""
    target = build_quiet_model(CONFIG, 7)
    target.save_pretrained(folder)
    add_block(folder, BlockOracle(CONFIG, target, 11))


def main() -> None:
    """Print one JSON line per number of requests; a drafter's first, small run warms it up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    vocab_size = CONFIG["vocab_size"]
    found: dict[int, dict[str, dict[str, float]]] = {count: {} for count in args.requests}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        for name, raw in CONSTRUCTED.items():
            core = make_core(raw, folder)
            measure(core, 8, 1, 8, "warm-up", vocab_size)
            for count, values in found.items():
                values[name] = measure(
                    core, PROMPT_TOKENS, count, args.tokens, f"{count}", vocab_size
                )
            core.shutdown()
    for count, values in found.items():
        print_result("recurrent_drafts", {"requests": count, "tokens": args.tokens}, values)


if __name__ == "__main__":
    main()
