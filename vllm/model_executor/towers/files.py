"""A tower in a checkpoint's files: whether it is there, and how it is named (torch-free)."""

from collections.abc import Iterable, Mapping
from hashlib import sha256

from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.towers.plans import TowerPlan

_SAMPLE_BYTES = 64
_READ_TYPES = ("F32", "F16", "BF16")


def pick_tensors(plan: TowerPlan, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Return a tower's tensors by its own names, of all that a checkpoint's files hold."""
    named = ((plan.own_name(tensor.name), tensor) for tensor in stored)
    return {name: tensor for name, tensor in named if name.startswith(plan.prefixes)}


def find_obstacle(plan: TowerPlan, stored: Mapping[str, StoredTensor]) -> str:
    """Return why tensors are not those of a tower; "" where they are."""
    for name, shape in plan.tensors().items():
        found = stored.get(name)
        if found is None:
            return f"its files lack the tower's {name}"
        if tuple(found.shape) != tuple(shape):
            return f"its tower's {name} has the shape {list(found.shape)}, not {list(shape)}"
        if found.dtype not in _READ_TYPES:
            return f"its tower's {name} is stored as {found.dtype}, which is not read"
    return ""


def find_fingerprint(plan: TowerPlan, stored: Mapping[str, StoredTensor]) -> str:
    """Return a digest of a tower: its sizes, and the first bytes of each of its tensors.

    The whole would take as long to read as to load; towers that were trained apart differ in
    every matrix.

    Raises:
        CheckpointError: A file cannot be read.
    """
    digest = sha256(repr(plan).encode())
    for name in sorted(plan.tensors()):
        tensor = stored[name]
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes)))
        except OSError as error:
            raise CheckpointError(f"{tensor.file} cannot be read: {error}.") from error
    return digest.hexdigest()
