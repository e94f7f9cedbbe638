"""Which cached prefixes continue which."""

from collections.abc import Mapping, Sequence

from vllm.utils.hashing import BlockHash


class Lineage:
    """A forest of cached units: a unit's parent is the prefix one unit shorter.

    Owns: the parent of each cached unit, how many cached units continue a prefix.
    """

    __slots__ = ("_num_children", "_parents")

    def __init__(self) -> None:
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._num_children: dict[BlockHash | None, int] = {}

    def add(self, prefix_hashes: Sequence[BlockHash], parents: Sequence[BlockHash | None]) -> None:
        """Enter units, each behind its parent (None: a prompt's first); known ones stay."""
        known, num_children = self._parents, self._num_children
        is_new = known.keys().isdisjoint(prefix_hashes) and num_children.keys().isdisjoint(parents)
        if is_new:
            # A chain that nobody knows: each unit but the last has one child.
            known.update(zip(prefix_hashes, parents, strict=True))
            num_children.update(dict.fromkeys(parents, 1))
            return
        for prefix_hash, parent in zip(prefix_hashes, parents, strict=True):
            if prefix_hash not in known:
                known[prefix_hash] = parent
                num_children[parent] = num_children.get(parent, 0) + 1

    def remove(self, prefix_hash: BlockHash) -> None:
        """Forget a unit that is not cached any more."""
        parent = self._parents.pop(prefix_hash)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]

    def clear(self) -> None:
        """Forget all."""
        self._parents.clear()
        self._num_children.clear()

    @property
    def parents(self) -> Mapping[BlockHash, BlockHash | None]:
        """Each cached unit with the one before it; None for a prompt's first."""
        return self._parents

    def parent_of(self, prefix_hash: BlockHash) -> BlockHash | None:
        """Return the prefix one unit shorter of a cached one; None for a first unit."""
        return self._parents.get(prefix_hash)

    def is_leaf(self, prefix_hash: BlockHash) -> bool:
        """Whether a prefix is cached that no cached one continues."""
        return prefix_hash in self._parents and prefix_hash not in self._num_children

    def has_other_continuation(self, prefix_hash: BlockHash, next_hash: BlockHash | None) -> bool:
        """Whether a cached prefix goes on with other tokens than those of ``next_hash``."""
        others = self._num_children.get(prefix_hash, 0)
        return others > (1 if next_hash is not None and next_hash in self._parents else 0)
