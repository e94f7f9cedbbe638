"""How far before prompts' ends checkpoints hold the rows of all layers: by what partial ones cost.

Layers that leave rows out compute a prompt's end alone. A spare checkpoint before that end lacks
their rows, and serves requests that go on for a while. Where short continuations of earlier prompts
are usual, it is better to compute a longer end:

    prompt          |--------------------------------------------|
    spare ends                         .             .      .
    all layers                                               xxxxx   short continuations pass them
    if kind 2 pays                                   xxxxxxxxxxxxx   and resume at two of them
"""

# Needs without which a kind is not believed in.
_MIN_NEEDS = 4
# Counts are halved when so many checkpoints of a kind were made.
_MEMORY = 1024


class FullEnds:
    """Weighs tokens that partial checkpoints make requests compute against those that full ones do.

        lost     tokens computed again because a checkpoint of the kind was partial, or would be
        taken    prompts that left one  *  tokens from it to the prompt's end

    Both are computed by the same layers, so a kind pays where more would be lost than taken.

    Owns: the counts, by kind of spare checkpoints.
    """

    __slots__ = ("_furthest", "_lost", "_made", "_needs")

    def __init__(self) -> None:
        self._made: dict[int, float] = {}
        self._lost: dict[int, float] = {}
        self._needs: dict[int, float] = {}
        self._furthest: dict[int, int] = {}

    def note_made(self, kind: int) -> None:
        """Count a checkpoint of a kind."""
        self._made[kind] = self._made.get(kind, 0.0) + 1
        if self._made[kind] >= _MEMORY:
            for counts in (self._made, self._lost, self._needs):
                counts[kind] = counts.get(kind, 0.0) / 2
            self._furthest.pop(kind, None)

    def note_need(self, kind: int, num_behind: int, num_lost: int, *, is_partial: bool) -> None:
        """Count a request that needs all layers' rows at one.

        Args:
            kind: Of the checkpoint.
            num_behind: Tokens behind it in the prompt that left it.
            num_lost: Tokens that are computed again if it is partial.
            is_partial: Whether it is: then its request leaves one that it would not have left.
        """
        if is_partial:
            self._made[kind] = max(0.0, self._made.get(kind, 0.0) - 1)
        self._needs[kind] = self._needs.get(kind, 0.0) + 1
        self._lost[kind] = self._lost.get(kind, 0.0) + num_lost
        self._furthest[kind] = max(self._furthest.get(kind, 0), num_behind)

    @property
    def length(self) -> int:
        """Tokens of prompts' ends of which it pays to compute all layers; 0: as few as do."""
        return max(
            (far for kind, far in self._furthest.items() if self._pays(kind, far)), default=0
        )

    def _pays(self, kind: int, num_behind: int) -> bool:
        if self._needs[kind] < _MIN_NEEDS:
            return False
        return self._lost[kind] > self._made.get(kind, 0.0) * num_behind
