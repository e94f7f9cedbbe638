"""Which spare checkpoints are worth as much as those that were asked for: by what came of both."""

from vllm.v1.core.retention.policy import ASKED_FOR

# Hits without which a kind is not believed in.
_MIN_HITS = 4
# Counts are halved when so many checkpoints were made.
_MEMORY = 4096


def spare_kind(distance: int) -> int:
    """Return the kind of a spare checkpoint: kinds grow fourfold with the distance.

    Traffic whose prompts share all but their last thousand tokens resumes a thousand tokens before
    their ends, and what lies elsewhere is of no use to it.

    Args:
        distance: Tokens from it to the prompt's end.
    """
    return (distance >> 7).bit_length() >> 1


class Yields:
    """Counts, by kind, checkpoints made and requests that resumed at one.

    Owns: the counts.
    """

    __slots__ = ("_hits", "_made", "_num_made")

    def __init__(self) -> None:
        self._made: dict[int, float] = {}
        self._hits: dict[int, float] = {}
        self._num_made = 0

    def note_made(self, kind: int) -> None:
        """Count a checkpoint."""
        self._made[kind] = self._made.get(kind, 0.0) + 1
        self._num_made += 1
        if self._num_made >= _MEMORY:
            self._num_made //= 2
            for counts in (self._made, self._hits):
                for each in counts:
                    counts[each] /= 2

    def note_hit(self, kind: int) -> None:
        """Count a request that resumed at a checkpoint of a kind."""
        self._hits[kind] = self._hits.get(kind, 0.0) + 1

    def is_promising(self, kind: int) -> bool:
        """Whether checkpoints of a spare kind are hit at least as often as those asked for."""
        hits = self._hits.get(kind, 0.0)
        if hits < _MIN_HITS:
            return False
        asked_hits = self._hits.get(ASKED_FOR, 0.0)
        asked_made = self._made.get(ASKED_FOR, 0.0)
        return hits * asked_made >= asked_hits * self._made.get(kind, 0.0)
