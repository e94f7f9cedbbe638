"""Whether a checkpoint that ties its output matrix to the embedding stores another one after all.

Files written by some trainers hold both although config.json says that they are one. transformers
then compares their values, and so do we: equal ones are one matrix, others are two.
"""

from collections.abc import Sequence

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.mapped_file import MappedFile
from vllm.model_executor.model_loader.safetensors_header import StoredTensor

_HEADS = ("lm_head.weight", "head.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed.weight")
_PLAIN = {"F32", "F16", "BF16"}
# Compared at a time, so that matrices that differ are told apart by their first rows.
_ROWS = 4096


def has_own_head(stored: Sequence[StoredTensor]) -> bool:
    """Return whether files hold an output matrix whose values are not those of the embedding.

    Only plain matrices are compared: a quantised head beside a tied embedding is left out.

    Raises:
        CheckpointError: A file cannot be read.
    """
    heads = _find(stored, _HEADS)
    embeddings = _find(stored, _EMBEDDINGS)
    if len(heads) != 1 or len(embeddings) != 1:
        return False
    (head,), (embedding,) = heads, embeddings
    if not {head.dtype, embedding.dtype} <= _PLAIN:
        return False
    if head.shape != embedding.shape:
        return True
    try:
        with MappedFile(head.file) as head_file, MappedFile(embedding.file) as embedding_file:
            pairs = zip(
                torch.split(head_file.read(head), _ROWS),
                torch.split(embedding_file.read(embedding), _ROWS),
                strict=True,
            )
            return not all(torch.equal(own.float(), shared.float()) for own, shared in pairs)
    except OSError as error:
        raise CheckpointError(f"{head.file} cannot be read: {error}.") from error


def _find(stored: Sequence[StoredTensor], leaves: tuple[str, ...]) -> list[StoredTensor]:
    """Return the main model's tensors of such a name, whatever wrapper it lies in."""
    return [
        tensor
        for tensor in stored
        if not tensor.name.startswith("mtp.")
        and (tensor.name in leaves or tensor.name.endswith(f".{leaves[0]}"))
    ]
