"""What a cache under another eviction rule would have hit."""

from collections import OrderedDict
from collections.abc import Sequence

from vllm.v1.core.retention.auto.eviction import Rule, choose_victim
from vllm.v1.core.retention.queues import Standing


class Shadow:
    """A cache of spans that holds no rows: it only counts.

    Owns: per standing the spans it would hold, by the stamp of their last use; the spans it gave up
    last, as many as it holds.

    Args:
        rule: In force, always.
        capacity: Spans it holds; may be changed.
    """

    __slots__ = ("_given_up", "_now", "_queues", "_rule", "capacity")

    def __init__(self, rule: Rule, capacity: int) -> None:
        self._rule = rule
        self.capacity = capacity
        self._queues: tuple[OrderedDict[int, int], ...] = tuple(OrderedDict() for _ in Standing)
        self._given_up: OrderedDict[int, None] = OrderedDict()
        self._now = 0

    def size(self, standing: Standing) -> int:
        """Return how many spans have a standing."""
        return len(self._queues[standing])

    def oldest(self, standing: Standing) -> int:
        """Return the stamp of the least recently used span of a standing."""
        return next(iter(self._queues[standing].values()))

    def newest(self, standing: Standing) -> int:
        """Return the stamp of the most recently used span of a standing."""
        return next(reversed(self._queues[standing].values()))

    def serve(self, keys: Sequence[int]) -> float:
        """Serve a prompt: count what hits, make room for the rest, and cache all of it.

        Args:
            keys: The prompt's spans in order.

        Returns:
            How many of the first spans were there.
        """
        held = self._use(keys)
        return held.index(False) if False in held else len(held)

    def _use(self, keys: Sequence[int]) -> list[bool]:
        """Bring spans to the top; returns which of them were there."""
        queues = self._queues
        held = [any(key in queue for queue in queues) for key in keys]
        for key in keys:
            for queue in queues:
                if queue.pop(key, None) is not None:
                    break
        self._make_room(len(keys))
        # The tail first, so that it is given up before the head.
        for key, was_held in zip(reversed(keys), reversed(held), strict=True):
            self._now += 1
            if was_held:
                standing = Standing.HIT
            elif key in self._given_up:
                del self._given_up[key]
                standing = Standing.RETURNED
            else:
                standing = Standing.NEW
            queues[standing][key] = self._now
        return held

    def _make_room(self, num_spans: int) -> None:
        num_held = sum(map(len, self._queues))
        for _ in range(min(num_held, num_held + num_spans - self.capacity)):
            self._give_up()

    def _give_up(self) -> int:
        """Give up the span that the rule chooses; returns it."""
        given_up = self._given_up
        standing, is_newest = choose_victim(self._rule, self, self.capacity, self._now)
        key, _stamp = self._queues[standing].popitem(last=is_newest)
        given_up[key] = None
        if len(given_up) > self.capacity:
            given_up.popitem(last=False)
        return key
