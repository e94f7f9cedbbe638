"""What each group holds of one request's prefix, followed through a replay."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVEventBatch,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash


@dataclass(frozen=True, slots=True)
class Loss:
    """An entry that left the cache.

    Attributes:
        at_event: Number of the trace's event in which it did.
        is_reset: Whether everything did.
    """

    at_event: int
    is_reset: bool


class PrefixWatch(EventPublisher):
    """Takes the KV events of a replay and keeps what they say of one prefix.

    Owns: what is held of it now, by group, and when the rest left.

    Args:
        hashes: Of the prefix, one per unit.
        unit: Tokens under one of them.
    """

    def __init__(self, hashes: Sequence[BlockHash], unit: int) -> None:
        super().__init__()
        self._unit = unit
        self._units: list[ExternalBlockHash] = [maybe_convert_block_hash(h) for h in hashes]
        self._known = set(self._units)
        # Several blocks may hold the same rows; each is announced, and leaves, by itself.
        self._held: dict[int, Counter[ExternalBlockHash]] = {}
        # Tokens between two entries of a group; 0: it has entries at checkpoints only.
        self._strides: dict[int, int] = {}
        self._losses: dict[tuple[int, ExternalBlockHash], Loss] = {}
        self.at_event = 0

    def publish(self, events: KVEventBatch) -> None:
        """Take a batch."""
        for event in events.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    if block_hash in self._known:
                        self._lose(event.group_idx or 0, block_hash)
            elif isinstance(event, AllBlocksCleared):
                for group, held in self._held.items():
                    for block_hash in held:
                        self._losses[group, block_hash] = Loss(self.at_event, is_reset=True)
                    held.clear()

    def _store(self, event: BlockStored) -> None:
        group = event.group_idx or 0
        self._strides.setdefault(group, event.block_size)
        held = self._held.setdefault(group, Counter())
        held.update(block_hash for block_hash in event.block_hashes if block_hash in self._known)

    def _lose(self, group: int, block_hash: ExternalBlockHash) -> None:
        held = self._held[group]
        held[block_hash] -= 1
        if held[block_hash] <= 0:
            del held[block_hash]
            self._losses[group, block_hash] = Loss(self.at_event, is_reset=False)

    def shutdown(self) -> None:
        """Do nothing."""

    def dense_matches(self) -> dict[int, int]:
        """Return, by group that keeps every token, how many leading tokens it holds."""
        return {g: self._matched(g, s) for g, s in sorted(self._strides.items()) if s > 0}

    def _matched(self, group: int, stride: int) -> int:
        step = max(1, stride // self._unit)
        held = self._held[group]
        for i in range(step - 1, len(self._units), step):
            if self._units[i] not in held:
                return i // step * step * self._unit
        return len(self._units) * self._unit

    def checkpoints(self) -> list[int]:
        """Return where window state is held, in tokens.

        It is whole or gone, and not every group needs some at every place: one that has it will do.
        """
        groups = [group for group, stride in self._strides.items() if stride == 0]
        if not groups:
            return []
        return [
            (i + 1) * self._unit
            for i, unit in enumerate(self._units)
            if any(unit in self._held[group] for group in groups)
        ]

    def partial_checkpoints(self, lazy_groups: Sequence[int]) -> list[int]:
        """Return where window state is held, but none of groups whose layers leave rows out."""
        if not lazy_groups:
            return []
        empty: Counter[ExternalBlockHash] = Counter()
        own = [self._held.get(group, empty) for group in lazy_groups]
        return [
            place
            for place in self.checkpoints()
            if not any(self._units[place // self._unit - 1] in held for held in own)
        ]

    def last_loss(self, begin: int, end: int, *, of_windows: bool) -> Loss | None:
        """Return how the latest lost entry between two positions left; None: none did.

        Args:
            begin: Token position, a unit's beginning.
            end: Token position.
            of_windows: Whether to look at checkpoints, not at rows that are kept for ever.
        """
        units = set(self._units[begin // self._unit : end // self._unit])
        found = [
            loss
            for (group, unit), loss in self._losses.items()
            if unit in units and (self._strides.get(group) == 0) == of_windows
        ]
        return max(found, key=lambda loss: loss.at_event, default=None)
