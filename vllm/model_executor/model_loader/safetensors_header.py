"""The header of a safetensors file, checked against the file before a value is read. Torch-free.

| 8 bytes: n, little-endian | n bytes of JSON | values ...                     |
                                              ^ data_offsets count from here

{"__metadata__": {...}, "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
        **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        "F4": 4,
    }
)
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_POINTER_MARK = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header describes it.

    Attributes:
        name: Its name in the file.
        shape: Its shape in the file; of F4 counted by value, two to a byte.
        dtype: Its type in safetensors' words, such as "BF16".
        file: The file that holds it.
        offset: Where in the file its values begin.
        num_bytes: How many bytes they take.
        undo: Makes these values of those that lie in the file, which a conversion changed; None:
            they are the same.
        sources: What lies in files, one argument of ``undo`` each; empty: what this describes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int = 0
    num_bytes: int = 0
    undo: Callable[..., "Tensor"] | None = None
    sources: tuple["StoredTensor", ...] = ()


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in the order of their values.

    Raises:
        CheckpointError: The file cannot be read, is cut short, or is no safetensors file.
    """
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(_LENGTH_BYTES)
            if (start + opened.read(len(_POINTER_MARK))).startswith(_POINTER_MARK):
                raise _broken(file, "it is a git-lfs pointer, not the file it stands for")
            num_header_bytes = int.from_bytes(start, "little")
            if file_bytes < _LENGTH_BYTES or not 0 < num_header_bytes <= _MAX_HEADER_BYTES:
                raise _broken(file, f"its {file_bytes:,} bytes do not begin with a header")
            if file_bytes < _LENGTH_BYTES + num_header_bytes:
                raise _cut(file, file_bytes, _LENGTH_BYTES + num_header_bytes)
            opened.seek(_LENGTH_BYTES)
            header = json.loads(opened.read(num_header_bytes))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(file, "its header is no JSON object")
    data_start = _LENGTH_BYTES + num_header_bytes
    stored = [
        _read_entry(file, name, entry, data_start)
        for name, entry in header.items()
        if name != _METADATA
    ]
    stored.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_layout(file, stored, data_start, file_bytes)
    return stored


def _read_entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = (*shape, start, stop)
        is_sound = all(type(size) is int and size >= 0 for size in sizes)
        num_bits = math.prod(shape) * ITEM_BITS[dtype] if is_sound else 0
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(file, f"its header describes {name} as {entry!r}") from error
    if not is_sound or num_bits != 8 * (stop - start):
        raise _broken(file, f"its header gives {name}, {dtype} {shape}, the bytes {start}..{stop}")
    return StoredTensor(name, tuple(shape), dtype, file, data_start + start, stop - start)


def _check_layout(file: Path, stored: list[StoredTensor], data_start: int, file_bytes: int) -> None:
    """Refuses values that overlap, leave a hole, or do not end where the file does."""
    position = data_start
    for tensor in stored:
        if tensor.offset != position:
            raise _broken(file, f"the values of {tensor.name} do not follow those before")
        position += tensor.num_bytes
    if file_bytes < position:
        raise _cut(file, file_bytes, position)
    if file_bytes > position:
        raise _broken(file, f"{file_bytes - position:,} bytes follow its last tensor")


def _cut(file: Path, num_bytes: int, wanted_bytes: int) -> CheckpointError:
    return _broken(file, f"it is cut short, {num_bytes:,} bytes of {wanted_bytes:,}")


def _broken(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a readable safetensors file: {reason}. Download it again."
    )
