"""Several settings of a cache on one load, side by side, in processes of their own."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from tqdm import tqdm

from vllm.cachelab.sim.settings import SimSettings, resize_disk
from vllm.exceptions import ConfigError

T = TypeVar("T")
V = TypeVar("V")
_PINS = "VLLM_PIN_SWA_TOKENS"
_PINNED_SUFFIX = "+pins"
# The policy that keeps nothing.
NO_CACHE = "off"


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting.

    Attributes:
        policy: A retention interval, with "+pins" behind it for pinned windows; "off": no cache.
        block_size: As ``--block-size``.
        pool_bytes: Of the pool.
        disk_bytes: Of the cache folder; None: as in the settings it is applied to.
    """

    policy: str
    block_size: int
    pool_bytes: int
    disk_bytes: int | None = None

    @property
    def interval(self) -> str:
        """The retention interval."""
        return self.policy.removesuffix(_PINNED_SUFFIX)

    @property
    def has_pins(self) -> bool:
        """Whether windows are pinned."""
        return self.policy.endswith(_PINNED_SUFFIX)

    def flags(self) -> str:
        """Return what to paste behind ``vllm serve MODEL``."""
        text = f"--block-size {self.block_size} --kv-cache-memory-bytes {self.pool_bytes} "
        if self.policy == NO_CACHE:
            return f"vllm serve MODEL {text}--no-enable-prefix-caching"
        text += f"--prefix-cache-retention-interval {self.interval}"
        if self.disk_bytes is not None:
            text += f" --prefix-cache-disk-size {self.disk_bytes}"
        return f"{_PINS}=1 vllm serve MODEL {text}" if self.has_pins else f"vllm serve MODEL {text}"

    def apply(self, settings: SimSettings) -> SimSettings:
        """Return settings changed to this one."""
        keeps = self.policy != NO_CACHE
        return replace(
            settings,
            block_size=self.block_size,
            pool_bytes=self.pool_bytes,
            num_blocks=None,
            enable_prefix_caching=keeps,
            interval=self.interval if keeps else settings.interval,
            tier=resize_disk(settings.tier, self.disk_bytes),
        )


@contextmanager
def pins(*, are_on: bool) -> Iterator[None]:
    """Set the variable that turns pins on, which the cache reads when it is made."""
    before = os.environ.get(_PINS)
    os.environ[_PINS] = "1" if are_on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PINS]
        else:
            os.environ[_PINS] = before


def run_grid(
    variants: Sequence[Variant],
    measure: Callable[[Variant], T],
    num_processes: int,
    *,
    shows_progress: bool = True,
) -> dict[Variant, T]:
    """Measure all variants.

    Args:
        variants: What to try.
        measure: Tries one; picklable, as it may run in another process.
        num_processes: Side by side; 1: in this process.
        shows_progress: Whether to draw a bar.

    Raises:
        ConfigError: A variant does not fit the model; names it.
    """
    return run_side_by_side(
        variants, partial(_try, measure), num_processes, shows_progress=shows_progress
    )


def run_side_by_side(
    variants: Sequence[V],
    measure: Callable[[V], T],
    num_processes: int,
    *,
    shows_progress: bool = True,
) -> dict[V, T]:
    """Measure all, in processes; see ``run_grid``."""
    silent = None if shows_progress else True
    found: dict[V, T] = {}
    if num_processes <= 1 or len(variants) == 1:
        for variant in tqdm(variants, desc="settings", disable=silent):
            found[variant] = measure(variant)
        return found
    with ProcessPoolExecutor(num_processes) as executor:
        waiting = {executor.submit(measure, variant): variant for variant in variants}
        done = as_completed(waiting)
        for future in tqdm(done, total=len(waiting), desc="settings", disable=silent):
            found[waiting[future]] = future.result()
    return {variant: found[variant] for variant in variants}


def _try(measure: Callable[[Variant], T], variant: Variant) -> T:
    try:
        with pins(are_on=variant.has_pins):
            return measure(variant)
    except ConfigError as error:
        raise ConfigError(
            f"{variant.policy}, --block-size {variant.block_size}: {error}"
        ) from error
