"""What the rows in a folder depend on: read by an engine that differs in any of it, they lie."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.distributed.kv_transfer.handover.manifest import make_manifest
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.kv_offload.store.folder import WEIGHTS_FILE, Identity
from vllm.v1.kv_offload.store.weights_digest import digest_files
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.layout import ObjectLayout

_LIBRARY = "libvllm_native.so"
_TOKENS = tuple(range(1, 17))


def find_identity(
    config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layout: ObjectLayout,
    root: Path,
    note_progress: Callable[[int, int], None],
    stop: threading.Event,
    *,
    read_only: bool = False,
) -> Identity | None:
    """Work out an engine's identity; reads all weights unless their digest is remembered.

    Args:
        config: The engine's.
        kv_cache_config: Its groups.
        layout: What objects are made of.
        root: The folder that all cores share, where the digest is remembered.
        note_progress: Called with bytes read so far, and in all.
        stop: Ends the reading early.
        read_only: Whether nothing may be written there.

    Returns:
        The identity; None: it was stopped.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: The checkpoint's files are missing or broken.
    """
    weights = _digest_weights(config, root, note_progress, stop, read_only)
    if weights is None:
        return None
    parts = make_manifest(config, kv_cache_config, "disk")
    parts["weights"] = weights
    parts["hashes"] = _known_answer(config)
    parts["numerics"] = describe_numerics(config)
    parts["objects"] = f"{layout.group_tokens} tokens"
    # The model's own type has the name that folders had before a default could be another.
    own = config.model_config.dtype
    named = config.cache_config.cache_dtype
    parts["cache dtype"] = "auto" if named == own else named
    num_workers = config.parallel_config.tensor_parallel_size
    return Identity(parts, num_workers, layout.usual_bytes())


def _digest_weights(
    config: VllmConfig,
    root: Path,
    note_progress: Callable[[int, int], None],
    stop: threading.Event,
    read_only: bool,
) -> str | None:
    model = config.model_config
    if config.load_config.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    files = find_weight_files(Path(model.path or model.model))
    drafts = None if config.speculative_config is None else config.speculative_config.drafts_file
    if drafts is not None:
        files = (*files, *find_weight_files(Path(drafts)))
    memory = root / WEIGHTS_FILE if root.is_dir() else None
    return digest_files(files, memory, note_progress, stop, remembers=not read_only)


def _known_answer(config: VllmConfig) -> str:
    """Return what fixed tokens hash to: another root or other hash code is another identity."""
    cache = config.cache_config
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    seed = cache.prefix_hash_seed or b""
    return sha256(hash_block_tokens(hash_fn, seed, _TOKENS)).hexdigest()[:16]  # type: ignore[arg-type]


def describe_numerics(config: VllmConfig) -> str:
    """Return what decides about the last bits of a row."""
    import torch  # noqa: PLC0415 - a front end imports this package to check its settings

    named = envs.VLLM_NATIVE_LIBRARY
    library = Path(named) if named else Path(envs.__file__).parent / "native" / _LIBRARY
    build = sha256(library.read_bytes()).hexdigest()[:16] if library.exists() else "none"
    return ", ".join(
        (
            f"version {__version__}",
            f"native {build if envs.VLLM_NATIVE else 'off'}",
            f"torch {torch.__version__}",
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            config.model_config.quantization or "plain",
        )
    )
