"""The header of a GGUF file, checked against the file before a value is read. Torch-free.

    "GGUF" | version 3 | tensors: 8 bytes | keys: 8 bytes | keys ... | tensors ... | values ...

A key is a name, a type and a value; a tensor a name, its sizes with the row's length first, a type
and where its values begin, counted from the first multiple of ``general.alignment`` behind the
header. Every count and length is held against the bytes that are left before it is believed.
Source: the GGUF specification of the ggml project.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm.exceptions import CheckpointError, UnsupportedFeatureError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_POINTER_MARK = b"version https://git-lfs"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1024
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
# Of one key and of one tensor, at the least.
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 13, 32
_SCALARS = ("B", "b", "H", "h", "I", "i", "f", "?", None, None, "Q", "q", "d")
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class BlockType:
    """How values of a type are stored: ``size`` of them in ``num_bytes``, along a row."""

    name: str
    size: int
    num_bytes: int


TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        10: BlockType("Q2_K", 256, 84),
        11: BlockType("Q3_K", 256, 110),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        16: BlockType("IQ2_XXS", 256, 66),
        17: BlockType("IQ2_XS", 256, 74),
        18: BlockType("IQ3_XXS", 256, 98),
        19: BlockType("IQ1_S", 256, 50),
        20: BlockType("IQ4_NL", 32, 18),
        21: BlockType("IQ3_S", 256, 110),
        22: BlockType("IQ2_S", 256, 82),
        23: BlockType("IQ4_XS", 256, 136),
        26: BlockType("I32", 1, 4),
        29: BlockType("IQ1_M", 256, 56),
        30: BlockType("BF16", 1, 2),
        34: BlockType("TQ1_0", 256, 54),
        35: BlockType("TQ2_0", 256, 66),
        39: BlockType("MXFP4", 32, 17),
        40: BlockType("NVFP4", 64, 36),
        41: BlockType("Q1_0", 128, 18),
        42: BlockType("Q2_0", 64, 18),
    }
)
# Named where a file is refused for them: retired ones, those of sums, and plain ones of no weights.
_OTHER_TYPES: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        9: "Q8_1",
        15: "Q8_K",
        24: "I8",
        25: "I16",
        27: "I64",
        28: "F64",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)


# Tables of which a step reads its tokens' rows from the file.
_STAY_IN_FILES = ("per_layer_token_embd.weight",)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as a file's header describes it.

    Attributes:
        name: Its name in the file.
        shape: Its sizes, the row's length last.
        type: How its values are stored.
        file: The file that holds it.
        offset: Where in the file its values begin.
        num_bytes: How many bytes they take.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    file: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a file's header says, or the headers of all parts of a split one.

    Attributes:
        path: The file, or its first part.
        keys: Key -> value; arrays are lists.
        tensors: By name.
    """

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    return str(path).endswith(SUFFIX)


def read_gguf(path: str | Path) -> GgufFile:
    """Read the header of a file, and of the other parts where it is the first of several.

    Raises:
        CheckpointError: A file cannot be read, is cut short, or is no GGUF file; the message names
            the file, the place and what was expected there.
        UnsupportedFeatureError: A tensor's type is not served.
    """
    first = Path(path)
    parts = []
    for file in find_parts(first):
        try:
            stat = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        parts.append(_read_part(file, stat.st_size, stat.st_mtime_ns))
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise _broken(part.path, f"tensor {name!r} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    declared = parts[0].keys.get("split.tensors.count", len(tensors))
    if declared != len(tensors):
        raise _broken(first, f"its parts hold {len(tensors)} tensors of {declared}")
    return GgufFile(first, parts[0].keys, MappingProxyType(tensors))


def count_least_bytes(file: GgufFile) -> int:
    """Return how many bytes of a processor's memory the tensors take at the least.

    Blocks are kept in no fewer bytes than the file has; halves are widened.
    """
    return sum(
        tensor.num_bytes * (2 if tensor.type.name == "F16" else 1)
        for tensor in file.tensors.values()
        if tensor.name not in _STAY_IN_FILES
    )


def is_coded(file: GgufFile) -> bool:
    """Whether most of the weights are stored in fewer than sixteen bits each."""
    bits = [
        (math.prod(tensor.shape), 8 * tensor.type.num_bytes / tensor.type.size)
        for tensor in file.tensors.values()
    ]
    return 2 * sum(count for count, each in bits if each < 16) > sum(count for count, _ in bits)


def find_parts(first: Path) -> tuple[Path, ...]:
    """Return a file and, where it is the first part of a split one, the others.

    Raises:
        CheckpointError: A part is missing, or the file is another part than the first.
    """
    match = _SHARD.fullmatch(first.name)
    if match is None:
        return (first,)
    stem, number, count = match.groups()
    if int(number) != 1:
        raise CheckpointError(
            f"{first} is part {int(number)} of {int(count)}: give the first part, "
            f"{stem}-00001-of-{count}.gguf."
        )
    files = [first.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{first.parent} lacks {len(missing)} of the {len(files)} parts of a split file, the "
            f"first {missing[0]}: download them again."
        )
    return tuple(files)


# Config, tokenizer and weights ask one after another.
@lru_cache(maxsize=8)
def _read_part(file: Path, num_bytes: int, modified_ns: int) -> GgufFile:
    del modified_ns  # a file that was written anew is read anew
    try:
        with file.open("rb") as opened:
            start = opened.read(len(_POINTER_MARK))
            if start.startswith(_POINTER_MARK):
                raise _broken(file, "it is a git-lfs pointer, not the file it stands for")
            if not start.startswith(_MAGIC):
                raise _broken(file, f"it begins with {start[:4]!r}, not {_MAGIC!r}")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _HeaderReader(file, mapped, num_bytes).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


class _HeaderReader:
    """Reads one header from front to back, and nothing beyond the file's end."""

    def __init__(self, file: Path, data: mmap.mmap, num_bytes: int) -> None:
        self._file, self._data = file, data
        self._size, self._at = min(num_bytes, len(data)), len(_MAGIC)

    def read(self) -> GgufFile:
        version = self._unpack("I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise _broken(self._file, "its numbers are big-endian, and little-endian is served")
            raise _broken(self._file, f"its version is {version}, and {_VERSIONS} are served")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_keys = self._count("keys", _MIN_KEY_BYTES)
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._name("a key's name")
            if name in keys:
                raise _broken(self._file, f"key {name!r} stands there twice")
            keys[name] = self._value(self._unpack("I", f"the type of key {name!r}"), name)
        alignment = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment % 8:
            raise _broken(self._file, f"general.alignment is {alignment!r}, no multiple of 8")
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, block, offset in entries:
            if name in tensors:
                raise _broken(self._file, f"tensor {name!r} stands there twice")
            tensors[name] = self._place(name, shape, block, offset, data_start, alignment)
        self._check_overlaps(tensors)
        return GgufFile(self._file, MappingProxyType(keys), MappingProxyType(tensors))

    def _take(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise _broken(
                self._file,
                f"{what} takes {count:,} bytes at byte {self._at:,}, and the file ends at "
                f"{self._size:,}",
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _unpack(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code), what))[0]

    def _count(self, what: str, min_bytes: int) -> int:
        """A number of things that each take so many bytes at the least."""
        count: int = self._unpack("Q", f"the number of {what}")
        if count > (self._size - self._at) // min_bytes:
            raise _broken(
                self._file,
                f"{count:,} {what} are promised at byte {self._at - 8:,}, more than the "
                f"{self._size - self._at:,} bytes behind can hold",
            )
        return count

    def _string(self, what: str) -> str:
        length = self._unpack("Q", f"the length of {what}")
        raw = self._take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _broken(
                self._file, f"{what} at byte {self._at - length:,} is no UTF-8"
            ) from error

    def _name(self, what: str) -> str:
        length = self._unpack("Q", f"the length of {what}")
        if length > _MAX_NAME_BYTES:
            raise _broken(
                self._file,
                f"{what} is {length:,} bytes long at byte {self._at - 8:,}, and at most "
                f"{_MAX_NAME_BYTES:,} are allowed",
            )
        self._at -= 8
        return self._string(what)

    def _value(self, kind: int, name: str) -> Any:
        what = f"the value of key {name!r}"
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            item = self._unpack("I", f"the type of the items of key {name!r}")
            if item == _STRING:
                count = self._count(f"strings of key {name!r}", 8)
                return [self._string(what) for _ in range(count)]
            code = self._code(item, name)
            size = struct.calcsize(code)
            count = self._count(f"items of key {name!r}", size)
            return list(struct.unpack(f"<{count}{code}", self._take(count * size, what)))
        return self._unpack(self._code(kind, name), what)

    def _code(self, kind: int, name: str) -> str:
        code = _SCALARS[kind] if kind < len(_SCALARS) else None
        if code is None:
            raise _broken(
                self._file, f"key {name!r} at byte {self._at:,} is of type {kind}, which is none"
            )
        return code

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._name("a tensor's name")
        num_dims = self._unpack("I", f"the number of sizes of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _broken(self._file, f"tensor {name!r} has {num_dims} sizes, not 1 to {_MAX_DIMS}")
        sizes = [self._unpack("Q", f"a size of tensor {name!r}") for _ in range(num_dims)]
        kind = self._unpack("I", f"the type of tensor {name!r}")
        if kind not in TYPES:
            spelled = f" ({_OTHER_TYPES[kind]})" if kind in _OTHER_TYPES else ""
            raise UnsupportedFeatureError(
                f"Tensor {name} of {self._file} is of type number {kind}{spelled}, which is not "
                f"served: use a file of {', '.join(block.name for block in TYPES.values())}."
            )
        offset = self._unpack("Q", f"the place of tensor {name!r}")
        return name, tuple(reversed(sizes)), TYPES[kind], offset

    def _place(
        self,
        name: str,
        shape: tuple[int, ...],
        block: BlockType,
        offset: int,
        data_start: int,
        alignment: int,
    ) -> GgufTensor:
        if shape[-1] % block.size:
            raise _broken(
                self._file,
                f"tensor {name!r} has rows of {shape[-1]:,} values, no multiple of the "
                f"{block.size} of a block of {block.name}",
            )
        num_bytes = math.prod(shape) // block.size * block.num_bytes
        start = data_start + offset
        if offset % alignment:
            raise _broken(
                self._file, f"tensor {name!r} begins at byte {start:,}, off its {alignment}"
            )
        if start + num_bytes > self._size:
            raise _broken(
                self._file,
                f"tensor {name!r} ({block.name} {list(shape)}) takes the bytes {start:,} to "
                f"{start + num_bytes:,}, and the file ends at {self._size:,}: it is cut short",
            )
        return GgufTensor(name, shape, block, self._file, start, num_bytes)

    def _check_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.num_bytes)):
            if tensor.offset < end:
                raise _broken(
                    self._file,
                    f"tensor {tensor.name!r} begins at byte {tensor.offset:,}, within {before!r}",
                )
            end, before = tensor.offset + tensor.num_bytes, tensor.name


def _broken(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a readable GGUF file: {reason}. Download it again.")
