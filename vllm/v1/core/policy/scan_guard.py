"""Noticing when least-recently-used order gives up every prefix just before its next use."""

from vllm.logger import init_logger

logger = init_logger(__name__)

# Admissions in a row that hit next to nothing of what was cached once. The longest such run on a
# public chat trace is 6, whatever the pool's size (docs/prefix_cache.md).
ENTER_AFTER = 12
# How often it is asked whether keeping what is there still pays.
REVIEW_EVERY = 128
# A hit counts if it saves at least this share of what could have been hit.
USEFUL_SHARE = 0.2


class ScanGuard:
    """Decides whether new prefixes are on trial: given up first until they are hit.

    Prompts that take turns and do not all fit are the worst case of LRU order, which hits none of
    them. Keeping some and giving up the newest hits those.

        cached   A B C D, then E: LRU    B C D E, A misses, C D E A, B misses, ... nothing hits
                                  guard  A B C and one place on trial: A B C hit, D E miss

    The memory of evicted prefixes tells: tokens that were cached once and are not any more are
    *lost*. The guard becomes active when many admissions in a row lost nearly all they could have
    hit, and is given up when that is so with the guard on, over a longer time.

    Owns: its counts.
    """

    __slots__ = ("_num_hit", "_num_lost", "_num_seen", "_num_useless", "is_active")

    def __init__(self) -> None:
        self.is_active = False
        self._num_useless = 0
        self._num_seen = 0
        self._num_hit = 0
        self._num_lost = 0

    def observe(self, num_hit_tokens: int, num_lost_tokens: int) -> None:
        """Take note of an admission; one that could have hit nothing says nothing."""
        if num_hit_tokens + num_lost_tokens == 0:
            return
        if self.is_active:
            self._review(num_hit_tokens, num_lost_tokens)
        elif _is_useful(num_hit_tokens, num_lost_tokens):
            self._num_useless = 0
        else:
            self._num_useless += 1
            if self._num_useless >= ENTER_AFTER:
                self.is_active = True
                self._num_seen = self._num_hit = self._num_lost = 0
                logger.info(
                    "The last %d prompts lost nearly all that was cached for them: they take turns "
                    "and do not all fit. New prefixes are given up first until they are hit; more "
                    "KV cache memory would help more.",
                    ENTER_AFTER,
                )

    def _review(self, num_hit_tokens: int, num_lost_tokens: int) -> None:
        self._num_seen += 1
        self._num_hit += num_hit_tokens
        self._num_lost += num_lost_tokens
        if self._num_seen >= REVIEW_EVERY:
            self.is_active = _is_useful(self._num_hit, self._num_lost)
            self._num_useless = 0
            self._num_seen = self._num_hit = self._num_lost = 0
            if not self.is_active:
                logger.info("New prefixes are kept as long as others again.")


def _is_useful(num_hit_tokens: int, num_lost_tokens: int) -> bool:
    return num_hit_tokens >= USEFUL_SHARE * (num_hit_tokens + num_lost_tokens)
