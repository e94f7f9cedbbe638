"""Which stored tensor goes where: decided for the whole checkpoint before a byte is read."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, float8_e4m3fn, float8_e8m0fnu, int8, uint8

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.model_loader.checkpoint_files import name_some
from vllm.model_executor.model_loader.safetensors_header import ITEM_BITS, StoredTensor
from vllm.model_executor.model_loader.shards import ELSEWHERE, Shard, ShardFinder, find_whole
from vllm.model_executor.model_loader.weight_names import TensorPart, published_parts

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGER_DTYPES = frozenset({"I64", "I32"})
_QUANTISED_DTYPES = frozenset(
    {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "I8", "U8"}
)
# Slots of one byte a value take these as they are; others take any type of their kind.
_BYTE_SLOTS = {
    int8: frozenset({"I8"}),
    uint8: frozenset({"I8", "U8", "F4"}),
    float8_e4m3fn: frozenset({"F8_E4M3"}),
    float8_e8m0fnu: frozenset({"F8_E8M0", "U8"}),
}
_MTP = "mtp."
PartFinder = Callable[[str, Sequence[int]], tuple[TensorPart, ...]]
# DeepSeek's DSpark drafter uses the MTP block's names for another network.
DSPARK_MARK = "mtp.0.main_proj.weight"


@dataclass(frozen=True, slots=True)
class Copy:
    """One published tensor: where it is stored, the slot of its name, which part the slot takes."""

    stored: StoredTensor
    part: TensorPart
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to copy.

    Attributes:
        copies: In the order of the stored tensors.
        mtp_present: Whether the model's multi-token-prediction block gets its weights.
        ignored: Published names of stored tensors that are left out on purpose, sorted.
        ignored_reason: Why, or empty.
    """

    copies: tuple[Copy, ...]
    mtp_present: bool
    ignored: tuple[str, ...] = ()
    ignored_reason: str = ""


@dataclass(slots=True)
class _Problems:
    """What keeps a checkpoint from fitting, by kind."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, items: Iterable[str]) -> None:
        found = list(items)
        if found:
            self.by_kind.setdefault(kind, []).extend(found)

    def raise_if_any(self, source: str) -> None:
        if not self.by_kind:
            return
        lines = [
            f"{len(items)} {kind}: {name_some(sorted(items))}"
            for kind, items in self.by_kind.items()
        ]
        raise CheckpointError(
            f"The tensors of {source} do not fit the model that its config.json describes.\n  "
            + "\n  ".join(lines)
        )


def plan_load(
    stored: Sequence[StoredTensor],
    slots: Mapping[str, Tensor],
    source: str,
    *,
    optional_prefixes: Sequence[str] = (),
    ignored_prefixes: Sequence[str] = (),
    find_parts: PartFinder = published_parts,
    find_shard: ShardFinder = find_whole,
) -> LoadPlan:
    """Match a checkpoint's tensors with a model's slots.

    Args:
        stored: What the files hold.
        slots: Destination by published name.
        source: The checkpoint, for messages.
        optional_prefixes: The tensors of such a prefix may all be absent, but not some of them.
        ignored_prefixes: Tensors with such a prefix have no slot on purpose.
        find_parts: Tells which slots a stored tensor of some name and shape fills.
        find_shard: Tells which part of a published tensor its slot takes.

    Raises:
        UnsupportedFeatureError: A tensor is quantised that the model keeps plain.
        CheckpointError: Tensors are missing, unexpected, stored twice, misshapen or mistyped.
    """
    copies = [
        Copy(tensor, part, shard)
        for tensor in stored
        for part in find_parts(tensor.name, tensor.shape)
        if (shard := find_shard(part.name)) is not ELSEWHERE
    ]
    dropped, reason = tuple(ignored_prefixes), "no part of the model that runs reads them"
    if any(c.part.name == DSPARK_MARK for c in copies):
        dropped = (*dropped, _MTP)
        reason = f"{reason}; a DSpark drafter is not supported yet"
    ignored = [c.part.name for c in copies if c.part.name.startswith(dropped)]
    copies = [c for c in copies if not c.part.name.startswith(dropped)]
    absent = tuple(p for p in optional_prefixes if not _any_starts_with(copies, p))
    wanted = {name for name in slots if not name.startswith(absent)}

    _refuse_quantised(copies, slots)

    counts = Counter(c.part.name for c in copies)
    problems = _Problems()
    problems.add("missing", wanted - set(counts))
    problems.add("unexpected", (name for name in counts if name not in slots))
    problems.add("stored twice", (name for name, count in counts.items() if count > 1))
    known = [c for c in copies if c.part.name in slots]
    problems.add("misshapen", (m for c in known if (m := _shape_problem(c, slots[c.part.name]))))
    problems.add("wrong type", (m for c in known if (m := _type_problem(c, slots[c.part.name]))))
    problems.raise_if_any(source)
    return LoadPlan(
        copies=tuple(copies),
        mtp_present=_any_starts_with(copies, _MTP),
        ignored=tuple(sorted(ignored)),
        ignored_reason=reason if ignored else "",
    )


def part_shape(copy: Copy) -> tuple[int, ...]:
    """Return the shape of the part of the stored tensor that a copy takes."""
    shape = whole_part_shape(copy)
    return shape if copy.shard is None else copy.shard.cut_shape(shape)


def whole_part_shape(copy: Copy) -> tuple[int, ...]:
    """Return the shape of the published tensor, of which other ranks may take other parts."""
    shape = copy.stored.shape
    if copy.stored.dtype == "F4":
        # Counted by value in the file, by byte of two values in memory.
        shape = (*shape[:-1], shape[-1] // 2)
    if copy.part.expert is not None:
        shape = shape[1:]
    rows = copy.part.rows
    return shape if rows is None else (rows[1] - rows[0], *shape[1:])


def part_bytes(copy: Copy) -> int:
    """Return the bytes a copy reads."""
    bits = 8 if copy.stored.dtype == "F4" else ITEM_BITS[copy.stored.dtype]
    return math.prod(part_shape(copy)) * bits // 8


def _refuse_quantised(copies: Sequence[Copy], slots: Mapping[str, Tensor]) -> None:
    for copy in copies:
        name, tensor = copy.part.name, copy.stored
        if name in slots and tensor.dtype in _slot_dtypes(slots[name]):
            continue
        is_scale = name not in slots and name.endswith(".scale")
        if is_scale or tensor.dtype in _QUANTISED_DTYPES:
            raise UnsupportedFeatureError(
                f"Tensor {tensor.name} of {tensor.file.name} is quantised (type {tensor.dtype}), "
                "but the checkpoint's config does not say how: config.json has no "
                "quantization_config, or one that leaves this tensor plain. Bring back the config "
                "that the weights were published with. If that is the one, the quantisation is not "
                "supported yet: serve a release in BF16 or F32."
            )


def _any_starts_with(copies: Iterable[Copy], prefix: str) -> bool:
    return any(copy.part.name.startswith(prefix) for copy in copies)


def _shape_problem(copy: Copy, slot: Tensor) -> str | None:
    found, wanted = whole_part_shape(copy), tuple(slot.shape)
    if copy.shard is not None:
        wanted = copy.shard.whole_shape(wanted)
    if found == wanted:
        return None
    return f"{copy.part.name} is {list(found)}, must be {list(wanted)}"


def _slot_dtypes(slot: Tensor) -> frozenset[str]:
    """Return the stored types a slot takes."""
    if slot.dtype in _BYTE_SLOTS:
        return _BYTE_SLOTS[slot.dtype]
    return _FLOAT_DTYPES if slot.is_floating_point() else _INTEGER_DTYPES


def _type_problem(copy: Copy, slot: Tensor) -> str | None:
    allowed = _slot_dtypes(slot)
    if copy.stored.dtype in allowed:
        return None
    return f"{copy.part.name} is {copy.stored.dtype}, must be one of {'/'.join(sorted(allowed))}"
