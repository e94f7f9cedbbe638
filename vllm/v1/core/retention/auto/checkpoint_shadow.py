"""A shadow in which rows are of use only below a checkpoint, and checkpoints take room."""

from collections.abc import Sequence

from vllm.v1.core.retention.auto.eviction import Rule
from vllm.v1.core.retention.auto.shadow import Shadow
from vllm.v1.core.retention.auto.superseding import Superseding


class CheckpointShadow(Shadow):
    """A cache of spans and of checkpoints that holds neither: it only counts.

    A prompt leaves a checkpoint where it ends and, from the second that goes on otherwise, where it
    parts from others. Spans behind the deepest one are of use only where their window rows are
    computed again, which costs some spans itself.

    Owns: also the spans that checkpoints end in.

    Args:
        rule: In force, always.
        capacity: Spans it holds if there are no checkpoints.
        weight: Of a checkpoint, in spans.
        rebuild: Spans to compute for window rows that are not there; None: that is not done.
        superseding: When a conversation's checkpoint is given up because it has one further on.
    """

    __slots__ = ("_before", "_marked", "_rebuild", "_superseding", "_weight")

    def __init__(
        self,
        rule: Rule,
        capacity: int,
        weight: float,
        rebuild: float | None = None,
        superseding: Superseding = Superseding.AT_ONCE,
    ) -> None:
        super().__init__(rule, capacity)
        self._weight = weight
        self._rebuild = rebuild
        self._superseding = superseding
        # Span -> whether prompts part there.
        self._marked: dict[int, bool] = {}
        # Span that a turn ended in -> where it had begun.
        self._before: dict[int, int] = {}

    def serve(self, keys: Sequence[int]) -> float:
        """Serve a prompt; returns how many of its first spans need not be computed."""
        held = self._use(keys)
        matched = held.index(False) if False in held else len(held)
        marked = self._marked
        resumed = next((n for n in range(matched, 0, -1) if keys[n - 1] in marked), 0)
        if 0 < resumed < len(keys):
            self._supersede(keys[resumed - 1], keys[-1])
        if resumed < matched < len(keys):
            marked[keys[matched - 1]] = True
        marked.setdefault(keys[-1], False)
        self._make_room(0)
        return resumed if self._rebuild is None else max(resumed, matched - self._rebuild)

    def _supersede(self, origin: int, end: int) -> None:
        """Give up what a conversation needs no more that went on at ``origin`` and now ends."""
        victim: int | None = None
        if self._superseding is Superseding.AT_ONCE:
            victim = origin
        elif self._superseding is Superseding.A_TURN_LATER:
            victim = self._before.pop(origin, None)
            self._before[end] = origin
        if victim is not None and self._marked.get(victim) is False:
            del self._marked[victim]

    def _make_room(self, num_spans: int) -> None:
        num_held = sum(map(len, self._queues))
        while num_held and (
            num_held + num_spans + self._weight * len(self._marked) > self.capacity
        ):
            key = self._give_up()
            self._marked.pop(key, None)
            self._before.pop(key, None)
            num_held -= 1
