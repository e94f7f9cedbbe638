"""``vllm inspect``: what a GGUF file holds, what it would be served as, and what that takes."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError, UnsupportedFeatureError, VllmError
from vllm.model_executor.model_loader.gguf_config import read_gguf_config
from vllm.model_executor.models.registry import resolve_model
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.host_memory import read_host_memory
from vllm.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from vllm.utils.gguf_file import GgufFile, is_gguf, read_gguf

_GB = 1e9
_LENGTHS = (4096, 32_768)
_EXIT_REFUSED = 1


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "inspect",
        help="Show what a GGUF file is, what it would be served as, and what memory that takes.",
        description="Read a GGUF file's header and print its model, the types of its tensors, "
        "what it would be served as on this machine's processor, the memory of its weights and of "
        "one request's cache by context length, or why it is refused. Loads no weights.",
    )
    parser.add_argument("file", help="The file, or the first part of a split one.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what a file is.

    Returns:
        0; 1 if it is not served.

    Raises:
        ConfigError: It is no GGUF file.
    """
    if not is_gguf(args.file):
        raise ConfigError(f"{args.file} is not the name of a GGUF file, which ends in .gguf.")
    report = make_report(args.file)
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        for name, value in report.items():
            print(f"{name.replace('_', ' ')}: {_show(value)}")
    return _EXIT_REFUSED if report["refused"] else 0


def make_report(path: str | Path) -> dict[str, Any]:
    """Return what there is to say of a file; ``refused`` are the reasons why it is not served.

    Raises:
        CheckpointError: It is broken.
    """
    refused: list[str] = []
    report: dict[str, Any] = {"file": str(path)}
    try:
        file = read_gguf(path)
    except UnsupportedFeatureError as error:
        return report | {"refused": [str(error)]}
    report |= _describe(file)
    try:
        report |= _describe_model(path, read_gguf_config(path))
    except VllmError as error:
        refused.append(str(error))
    try:
        read_gguf_tokenizer(path)
    except VllmError as error:
        refused.append(str(error))
    total, free = read_host_memory()
    report["memory_of_this_machine"] = f"{total / _GB:.1f} GB, {free / _GB:.1f} GB of it free"
    if report["weights_in_memory_bytes"] > total:
        refused.append("the weights take more memory than this machine has")
    return report | {"refused": refused}


def _describe(file: GgufFile) -> dict[str, Any]:
    from vllm.model_executor.layers.quantization.gguf_blocks import (  # noqa: PLC0415  (loads torch)
        kept_bytes,
    )

    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += tensor.num_bytes
        numbers[tensor.type.name] += 1
    return {
        "name": file.keys.get("general.name"),
        "architecture": file.keys.get("general.architecture"),
        "parts": len({tensor.file for tensor in file.tensors.values()}),
        "tensors": len(file.tensors),
        "types": {
            name: f"{numbers[name]} tensors, {size / _GB:.3f} GB"
            for name, size in sizes.most_common()
        },
        "weights_in_file_bytes": sizes.total(),
        "weights_in_memory_bytes": sum(kept_bytes(name, size) for name, size in sizes.items()),
    }


def _describe_model(path: str | Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config is served as, and the cache of one request by its length."""
    import torch  # noqa: PLC0415  (other commands do not load it)

    from vllm.v1.worker.dtypes import resolve_cache_dtype  # noqa: PLC0415  (loads torch)

    entry = resolve_model(raw["architectures"])
    parsed = entry.parse_config(raw)
    make_specs, block_size = entry.load_kv_cache_specs(), entry.load_block_sizes()[0]
    longest = parsed.max_position_embeddings
    own = {**raw, "vocab_size": parsed.vocab_size, "max_position_embeddings": longest}

    def configure(length: int) -> VllmConfig:
        return VllmConfig(
            model_config=ModelConfig(
                str(path), hf_config=own, max_model_len=length, dtype="float32"
            ),
            scheduler_config=replace(SchedulerConfig(), max_model_len=length),
        )

    def count_bytes(dtype: torch.dtype, length: int) -> int:
        specs = make_specs(parsed, block_size, dtype, torch.float32)
        return sum(spec.max_memory_usage_bytes(configure(length)) for spec in specs.values())

    usual = resolve_cache_dtype(
        CpuPlatform().default_cache_dtype(configure(longest)), torch.float32
    )
    lengths = sorted({*(n for n in _LENGTHS if n < longest), longest})
    by_type = {"float32": count_bytes(torch.float32, longest)}
    for name, dtype in (("float16", torch.float16), ("int8", torch.int8)):
        with suppress(ConfigError):  # a model that is not cached so
            by_type[name] = count_bytes(dtype, longest)
    return {
        "served_as": ", ".join(raw["architectures"]),
        "cache_bytes_by_context_length": {
            str(length): count_bytes(usual, length) for length in lengths
        },
        f"cache_bytes_of_{longest}_tokens_by_kv_cache_dtype": by_type,
    }


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(f"\n  {name}: {_show(own)}" for name, own in value.items())
    if isinstance(value, list):
        return "".join(f"\n  {own}" for own in value) if value else "no"
    if isinstance(value, int) and value >= 1_000_000:
        return f"{value:,} ({value / _GB:.2f} GB)"
    return "-" if value is None else str(value)
