"""What two engines must have in common for one to read the other's cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.handover.fingerprint import fingerprint_weights
from vllm.distributed.kv_transfer.handover.messages import Hello

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

PROTOCOL = "1"
# Where a checkpoint came from, and who wrote it, changes no row.
_PROVENANCE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


def make_manifest(
    config: VllmConfig, kv_cache_config: KVCacheConfig, transport: str = "tcp", rank: int = 0
) -> dict[str, str]:
    """Return, by name, what must be equal; values are short enough to be read in a log.

    Args:
        config: All configuration.
        kv_cache_config: Of the worker.
        transport: What its rows travel by.
        rank: Its index among those that share its model: each holds heads of its own.

    Raises:
        CheckpointError: The checkpoint's files cannot be read.
    """
    model, parallel = config.model_config, config.parallel_config
    inputs = model.quantized_inputs
    speculative = config.speculative_config
    groups = kv_cache_config.kv_cache_groups
    drafter = speculative.method if speculative is not None and speculative.use_eagle() else None
    hf_config = {k: v for k, v in model.hf_config.items() if k not in _PROVENANCE}
    return {
        "protocol": PROTOCOL,
        "transport": transport,
        "architecture": ",".join(model.architectures),
        "config.json": _digest(hf_config),
        "weights": fingerprint_weights(config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "block_size": str(config.cache_config.block_size),
        "hit unit": str(kv_cache_config.hit_unit or config.cache_config.block_size),
        "drafter": str(drafter),
        "tensor parallel": str(parallel.tensor_parallel_size),
        "rank": str(rank),
        "pipeline parallel": str(parallel.pipeline_parallel_size),
        "KV groups": "; ".join(_describe(group) for group in groups),
        "KV pages": _digest([_pages(group) for group in groups]),
        "KV strides": ",".join(
            str(tensor.block_stride or tensor.size // kv_cache_config.num_blocks)
            for tensor in kv_cache_config.kv_cache_tensors[:1]
        ),
        # Named where they are not the usual, so that engines and folders of before still match.
        **_key_sizes(groups),
        **({} if inputs in ("auto", "exact") else {"inputs of products": inputs}),
    }


def _describe(group: KVCacheGroupSpec) -> str:
    spec = group.kv_cache_spec
    role = ", drafter's" if group.is_eagle_group else ""
    return f"{spec.wire_name} x {len(group.layer_names)} of {spec.block_size}{role}"


def _pages(group: KVCacheGroupSpec) -> list[list[Any]]:
    pages = []
    for name, spec in group.layer_specs().items():
        dtype = str(getattr(spec, "dtype", ""))
        pages.append([name, spec.storage_block_size, spec.page_size_bytes, dtype])
    return pages


def _key_sizes(groups: Sequence[KVCacheGroupSpec]) -> dict[str, str]:
    """What keys were divided by, if they were: one digest, as one load measures them all."""
    specs = [spec for group in groups for spec in group.layer_specs().values()]
    digests = dict.fromkeys(getattr(spec, "key_sizes", "") for spec in specs)
    named = ",".join(filter(None, digests))
    return {"sizes of int8 keys": named} if named else {}


def _digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def find_mismatch(ours: Hello, theirs: Hello) -> str | None:
    """Return the first thing that differs, with both sides' values, in one line; None: nothing."""
    names = dict.fromkeys([*ours.manifest, *theirs.manifest])
    for name in names:
        here, there = (side.manifest.get(name, "(not told)") for side in (ours, theirs))
        if here != there:
            return (
                f"KV caches do not match: {name} is {here!r} at engine {ours.engine_id} and "
                f"{there!r} at engine {theirs.engine_id}"
            )
    return None
