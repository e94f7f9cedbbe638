"""Whether coarse checkpoints give back as much for their memory as what is cached in all."""

from vllm.v1.core.retention.policy import COARSE

# Checkpoints of the kind after which it must have paid.
_TRIAL = 64
# Counts are halved when so many checkpoints were made.
_MEMORY = 4096


class Returns:
    """Weighs tokens that hits saved against the memory that was taken for them.

        all       tokens that hit  /  (tokens computed + checkpoints made * what one weighs)
        coarse    tokens that hit at such checkpoints  /  (such checkpoints * what one weighs)

    Long prompts that share little pay for a checkpoint each; short turns of long conversations,
    which go on where others ended, do not pay for a second one.

    Owns: the counts.

    Args:
        checkpoint_tokens: Tokens of dense rows that weigh as much as a checkpoint.
        partial_share: The part of this that one weighs which lacks the rows of some layers.
    """

    __slots__ = (
        "_coarse_hit",
        "_coarse_made",
        "_hit",
        "_made",
        "_partial_share",
        "_prompt",
        "_weight",
    )

    def __init__(self, checkpoint_tokens: float, partial_share: float = 1.0) -> None:
        self._weight = checkpoint_tokens
        self._partial_share = partial_share
        self._prompt = self._hit = self._coarse_hit = 0.0
        self._made = self._coarse_made = 0.0

    def note_prompt(self, num_tokens: int) -> None:
        """Count an admitted prompt."""
        self._prompt += num_tokens

    def note_made(self, kind: int, *, is_partial: bool = False) -> None:
        """Count a checkpoint that somebody asked for, a partial one as what it weighs."""
        share = self._partial_share if is_partial else 1.0
        self._made += share
        self._coarse_made += share * (kind == COARSE)
        if self._made >= _MEMORY:
            self._prompt /= 2
            self._hit /= 2
            self._coarse_hit /= 2
            self._made /= 2
            self._coarse_made /= 2

    def note_hit(self, kind: int | None, num_tokens: int) -> None:
        """Count a request that resumed behind so many tokens."""
        self._hit += num_tokens
        if kind == COARSE:
            self._coarse_hit += num_tokens

    @property
    def has_coarse_failed(self) -> bool:
        """Whether coarse checkpoints, given time, gave back less than the rest does."""
        if self._coarse_made < _TRIAL:
            return False
        taken = max(0.0, self._prompt - self._hit) + self._made * self._weight
        return self._coarse_hit * taken < self._hit * self._coarse_made * self._weight
