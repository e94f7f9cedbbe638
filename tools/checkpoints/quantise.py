"""Converts a float DeepSeek-V4 checkpoint to the published FP8 and FP4 spelling.

    python -m tools.checkpoints.quantise --source FLOAT_FOLDER --out FOLDER

The source may be in any spelling that the loader reads. Matrices are rounded; what is not a matrix
of a layer keeps its values as far as BF16 and FP32 do. Other files (tokenizer, generation config)
are copied.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tools.checkpoints.published_spelling import Spelling, write_config, write_shards
from vllm.exceptions import ConfigError, VllmError
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files, read_headers
from vllm.model_executor.model_loader.loader import take_part
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.resolve import read_hf_config
from vllm.model_executor.model_loader.weight_names import published_parts
from vllm.utils.argparse_utils import human_int

_DEFAULT_SHARD_BYTES = 5_000_000_000
_OTHER_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer.model")


def quantise_checkpoint(
    source: Path,
    out: Path,
    spelling: Spelling | None = None,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> int:
    """Write the checkpoint of the folder ``source`` into the folder ``out``.

    Args:
        source: A float checkpoint.
        out: Another folder; its weights are overwritten.
        spelling: How matrices are stored; None: as in the Flash and Pro releases.
        max_shard_bytes: Largest file, unless one tensor is larger.

    Returns:
        The bytes of all tensors written.

    Raises:
        ConfigError: The folders are one, or the source is quantised already.
        CheckpointError: The source is broken.
    """
    spelling = spelling or Spelling()
    if source.resolve() == out.resolve():
        raise ConfigError(f"{out} is the source itself: give another folder.")
    config = read_hf_config(source)
    if config.get("quantization_config"):
        raise ConfigError(f"{source} is quantised already: give a float checkpoint.")
    num_bytes = write_shards(_spelled(source, spelling), out, max_shard_bytes)
    for pattern in _OTHER_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    write_config(config | spelling.config_fields(), out)
    return num_bytes


def float_tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a float checkpoint tensor by tensor, by published name.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    for file in find_weight_files(source):
        with MappedFile(file) as mapped:
            for stored in read_headers([file]):
                tensor = mapped.read(stored)
                for part in published_parts(stored.name, stored.shape):
                    yield part.name, take_part(tensor, part).clone()
                del tensor
                mapped.release(stored)


def _spelled(source: Path, spelling: Spelling) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in float_tensors(source):
        yield from spelling.spell(name, tensor).items()


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--source", type=Path, required=True, help="folder of a float checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--expert-dtype", choices=("fp4", "fp8"), default="fp4")
    parser.add_argument("--group-size", type=human_int, default=32, help="columns of an FP4 group")
    parser.add_argument(
        "--float-scales", action="store_true", help="fp32 scales of FP8, as in Base releases"
    )
    parser.add_argument("--max-shard-bytes", type=human_int, default=_DEFAULT_SHARD_BYTES)
    args = parser.parse_args()
    try:
        spelling = Spelling(
            args.expert_dtype, group_size=args.group_size, float_scales=args.float_scales
        )
        num_bytes = quantise_checkpoint(args.source, args.out, spelling, args.max_shard_bytes)
    except VllmError as error:
        print(f"quantise: error: {error}", file=sys.stderr)
        return 2
    summary: dict[str, Any] = {"out": str(args.out), "num_bytes": num_bytes}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
