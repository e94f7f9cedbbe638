"""A memory of what was evicted."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.utils.hashing import BlockHash


@dataclass(slots=True)
class GhostList:
    """A bounded memory of evicted hashes, to tell "evicted" from "first seen".

    Owns: its entries, oldest dropped first.
    """

    capacity: int
    _entries: OrderedDict[BlockHash, int] = field(default_factory=OrderedDict)

    def add(self, prefix_hash: BlockHash, time: int = 0) -> None:
        """Remember a hash, and when it was evicted."""
        self._entries[prefix_hash] = time
        self._entries.move_to_end(prefix_hash)
        if len(self._entries) > self.capacity:
            self._entries.popitem(last=False)

    def discard(self, prefix_hashes: Iterable[BlockHash]) -> None:
        """Forget hashes: they are cached again."""
        if self._entries:
            for prefix_hash in prefix_hashes:
                self._entries.pop(prefix_hash, None)

    def time_of(self, prefix_hash: BlockHash) -> int | None:
        """Return when a hash was evicted; None if it is not remembered."""
        return self._entries.get(prefix_hash)

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, prefix_hash: BlockHash) -> bool:
        return prefix_hash in self._entries
