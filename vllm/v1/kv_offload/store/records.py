"""What an object is: its key and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.store.cells import ObjectKind
from vllm.v1.kv_offload.store.free_slots import Extents

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """An object's name.

    Attributes:
        kind: What it is.
        digest: The first 16 bytes of the hash of the prefix at whose end it stands.
    """

    kind: ObjectKind
    digest: bytes

    @classmethod
    def of(cls, kind: ObjectKind, prefix_hash: bytes) -> ObjectKey:
        """Name the object of a kind at the end of a prefix."""
        return cls(kind, bytes(prefix_hash[:KEY_BYTES]))


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An object to be written.

    Attributes:
        key: Its name.
        position: Tokens of the prefix at whose end it stands.
        num_bytes: Its size, at each worker.
        next_token: The token that followed when a drafter's last row was made, if known.
        is_shared: Whether several prompts are known to go on from here, each in its own way.
    """

    key: ObjectKey
    position: int
    num_bytes: int
    next_token: int | None = None
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an object's bytes are in a rows file, and what they must be sealed with.

    Attributes:
        key: The object's name.
        sequence: Of its write; no two objects of a folder share one.
        num_bytes: Its size without the seal.
        slots: Runs of slots.
    """

    key: ObjectKey
    sequence: int
    num_bytes: int
    slots: Extents


@dataclass(frozen=True, slots=True)
class Reservation:
    """An object on its way to the disk; nobody finds it yet."""

    spec: ObjectSpec
    extent: Extent


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that the index knows.

    Attributes:
        cell: Its cell in the index.
        extent: Where it is.
        position: Tokens of the prefix at whose end it stands.
        next_token: See ``ObjectSpec``.
        is_shared: Likewise.
    """

    cell: int
    extent: Extent
    position: int
    next_token: int | None
    is_shared: bool = False


Objects = Sequence[StoredObject]
