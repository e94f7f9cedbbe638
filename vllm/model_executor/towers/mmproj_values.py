"""The values of a tower in a GGUF file of its own, decoded as they are read."""

from pathlib import Path

import torch

from vllm.model_executor.model_loader.gguf_names import decode_blocks, describe_tensor
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.towers.mmproj import Piece, find_pieces


def read_mmproj_tensors(path: str | Path) -> list[StoredTensor]:
    """Return a file's tower by the names of ``TowerPlan.tensors``; values come in fp32.

    Raises:
        CheckpointError: The file is broken.
        ConfigError: It holds no tower that is served.
    """
    return [_decoded(name, piece) for name, piece in find_pieces(path).items()]


def _decoded(name: str, piece: Piece) -> StoredTensor:
    sources = tuple(describe_tensor(tensor, tensor.name) for tensor in piece.tensors)

    def make(*stored: torch.Tensor) -> torch.Tensor:
        values = [
            own.float()
            if tensor.type.size == 1
            else decode_blocks(tensor.type.name, own.flatten(0, -2), name).view(tensor.shape)
            for own, tensor in zip(stored, piece.tensors, strict=True)
        ]
        return piece.combine(*values)

    first = sources[0]
    return StoredTensor(
        name, piece.shape, "F32", first.file, first.offset, first.num_bytes, make, sources
    )
