"""A fingerprint of a checkpoint's weights: cheap enough to take at every start."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.model_executor.model_loader.checkpoint_files import describe_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of each tensor, from its beginning and its middle: a fine-tuned copy differs all over.
_SAMPLE_BYTES = 4096


def fingerprint_weights(config: VllmConfig) -> str:
    """Return a digest of the names, shapes, types and samples of a checkpoint's tensors.

    Samples, not all bytes: it tells two checkpoints apart that were trained differently, and not
    one from its copy with a single value changed behind the sampled ones.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    model = config.model_config
    if config.load_config.load_format == "dummy":
        return f"dummy, seed {model.seed}"
    digest = sha256()
    tensors = describe_weights(Path(model.path or model.model))
    for tensor in sorted(tensors, key=lambda item: item.name):
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        with tensor.file.open("rb") as file:
            for offset in dict.fromkeys((0, tensor.num_bytes // 2)):
                file.seek(tensor.offset + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes - offset)))
    return digest.hexdigest()[:16]
