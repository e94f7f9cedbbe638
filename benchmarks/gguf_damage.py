"""Damaged GGUF files and random blocks, by the thousand: none may crash what reads them.

    python -m benchmarks.gguf_damage [--headers 15000] [--blocks 15000] [--seed 0] [--only NAME]

Headers of small files (a dense model with a tokenizer, the mix of DeepSeek-V4 that people have, its
block that drafts) get one to eight bytes or numbers of their own. Each is read as a config, as
tensors, as a tokenizer, and inspected: that ends well or by an error of the engine's own, within
seconds. Blocks of every type are random bytes, or extreme ones; they are packed and multiplied by.
One JSON line; exits with 1 at the first crash, which it names.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.model_executor.model_loader import gguf_v4, test_gguf, test_gguf_v4
from tests.model_executor.model_loader.gguf_files import Type, write_gguf
from tests.model_executor.model_loader.hostile_gguf import (
    BlockTrial,
    damage_header,
    find_header_end,
)
from tests.model_executor.models.decoder.reference import build_hf_model
from tests.tokenizers.family_tokenizers import byte_level
from vllm.entrypoints.cli.inspect import make_report
from vllm.exceptions import VllmError
from vllm.model_executor.layers.quantization.gguf_blocks import BLOCK_FORMS
from vllm.model_executor.model_loader.gguf_config import read_gguf_config
from vllm.model_executor.model_loader.loader import read_stored_tensors
from vllm.tokenizers.gguf_tokenizer import read_gguf_tokenizer

_LONGEST_S, _MOST_BYTES = 10.0, 8 << 30


def write_files(folder: Path) -> Iterator[Path]:
    """Write the files that are damaged."""
    raw = {**test_gguf.make_raw("qwen3"), "vocab_size": byte_level().vocab_size}
    state = dict(build_hf_model(raw, seed=7).state_dict())
    state.pop("lm_head.weight", None)
    write_gguf("qwen3", raw, state, folder / "qwen3.gguf", [Type.Q4_K], byte_level())
    tensors = test_gguf_v4.draw(test_gguf_v4.WIDE)
    gguf_v4.write_v4(test_gguf_v4.WIDE, tensors, folder / "v4.gguf", test_gguf_v4.as_released)
    yield from (folder / name for name in ("qwen3.gguf", "v4.gguf", "mtp-v4.gguf"))


def read_whole(path: Path) -> None:
    """Read all that a start reads of a header."""
    read_gguf_config(path)
    read_stored_tensors(path)
    read_gguf_tokenizer(path)
    make_report(path)


def try_headers(path: Path, count: int, seed: int, told: Counter[str]) -> None:
    """Read a file with so many kinds of damage."""
    whole, end, rng = path.read_bytes(), find_header_end(path), random.Random(f"{path.name} {seed}")
    for _ in range(count):
        path.write_bytes(damage_header(rng, whole, end))
        began = time.process_time()
        try:
            read_whole(path)
            told["headers read"] += 1
        except VllmError:
            told["headers refused"] += 1
        except MemoryError as error:
            raise SystemExit(f"{path}: a header took more than {_MOST_BYTES:,} bytes") from error
        took = time.process_time() - began
        if took > _LONGEST_S:
            raise SystemExit(f"{path}: {took:.1f} s for one header")


def main() -> int:
    """Print what was tried.

    Returns:
        0, unless it crashes.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--headers", type=int, default=15_000)
    parser.add_argument("--blocks", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Damage this file alone.")
    args = parser.parse_args()
    told: Counter[str] = Counter()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for path in write_files(Path(folder)) if args.only in path.name]
        for path in paths:
            try_headers(path, -(-args.headers // len(paths)), args.seed, told)
    trial, names = BlockTrial(args.seed), list(BLOCK_FORMS)
    for number in range(args.blocks):
        is_extreme, rounds = number % 5 == 4, number % 2 == 0
        is_sound = trial.run(
            names[number % len(names)],
            is_extreme=is_extreme,
            inputs="bytes by group" if rounds else "whole",
        )
        told["blocks multiplied" if is_sound else "blocks refused"] += 1
    print(json.dumps({"seed": args.seed, **told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
