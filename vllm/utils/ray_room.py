"""Room on a Ray cluster: what is asked for, what there is, and how long to wait for it.

Ray itself waits for ever, since another job may end or an autoscaler may bring machines.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

# How often somebody who waits is told.
_TELL_S = 30.0
# What Ray keeps to itself: a machine's own name, memory, kinds of accelerators.
_COUNTED = ("CPU", "GPU", "NPU")
# Keys and names of Ray's first autoscaler: where its monitor keeps the state, and how it calls the
# type of a machine that somebody else started.
_AUTOSCALER_STATE = "__autoscaling_status"
_JOINED_BY_HAND = "node_"
# Of what Ray counts in ten-thousandths.
_ROUNDED = 1e-6


@dataclass(frozen=True)
class Asked:
    """What is to be placed.

    Attributes:
        what: For the error.
        each: Resources that one of them takes, all on one machine.
        count: How many of them.
        cure: What to do instead of adding machines, as ``lower --data-parallel-size``.
    """

    what: str
    each: Mapping[str, float]
    count: int
    cure: str

    def fits(self, machines: Sequence[Mapping[str, float]]) -> bool:
        """Return whether machines with so much could hold all of them."""
        needs = {name: amount for name, amount in self.each.items() if amount}
        if not needs:
            return bool(machines)
        held = (
            min(int(has.get(name, 0) / amount + _ROUNDED) for name, amount in needs.items())
            for has in machines
        )
        return sum(held) >= self.count


def needs_of(num_workers: int, device: str) -> dict[str, float]:
    """Return what so many workers take, with a CPU each.

    Args:
        num_workers: On one machine.
        device: Ray's name of what each runs on; "": it knows none.
    """
    return {name: float(num_workers) for name in ("CPU", device) if name}


def read_machines(ray: Any) -> list[dict[str, float]]:
    """Return what each living machine has, free or not."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def may_grow(ray: Any) -> bool:
    """Return whether an autoscaler could bring machines, as far as the cluster says so."""
    from ray.autoscaler.v2.utils import is_autoscaler_v2  # noqa: PLC0415  (optional)

    if is_autoscaler_v2():
        return True
    state = ray.experimental.internal_kv._internal_kv_get(_AUTOSCALER_STATE)
    report = json.loads(state).get("autoscaler_report") if state else None
    types = (report or {}).get("node_type_mapping") or {}
    return not all(name.startswith(_JOINED_BY_HAND) for name in types.values())


def describe_lack(ray: Any, asked: Asked) -> str:
    """Return what is asked for, what there is, and what to do."""
    names = {*_COUNTED, *asked.each}
    machines = Counter(_write(has, names) for has in read_machines(ray))
    there = ", ".join(f"{count} x [{has}]" for has, count in sorted(machines.items()))
    free = _write(ray.available_resources(), names)
    times = f"{asked.count} x [{_write(asked.each, names)}], each on one machine"
    return (
        f"The Ray cluster has no room for {asked.what}: it takes {times}. The cluster's machines "
        f"have {there or 'nothing'}, of which [{free}] is free altogether. Add machines (`ray "
        f"start --address ...`), end what else runs there, or {asked.cure}."
    )


def _write(resources: Mapping[str, float], names: set[str]) -> str:
    parts = [f"{name}: {resources[name]:g}" for name in sorted(names) if resources.get(name)]
    return ", ".join(parts) or "nothing"


class RoomWatch:
    """Bounds a wait for room.

    Args:
        ray: The module, connected.
        asked: What waits.
        is_placed: Whether it has a place after all, and waits for something else; asked seldom.
        clock: Of seconds.

    Owns: since when.
    """

    def __init__(
        self,
        ray: Any,
        asked: Asked,
        is_placed: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ray, self._asked, self._is_placed, self._clock = ray, asked, is_placed, clock
        self._limit_s = envs.VLLM_RAY_ROOM_TIMEOUT
        self._began = clock()
        self._tell_at = _TELL_S

    def check(self) -> None:
        """Say that something still waits; ask every second or so, as long as it does.

        Raises:
            ConfigError: For too long, and no autoscaler will bring what it needs.
        """
        waited = self._clock() - self._began
        if waited < min(self._limit_s, self._tell_at):
            return
        if self._is_placed():
            self._began = self._clock()
            return
        grows = may_grow(self._ray)
        if waited >= self._limit_s and not grows:
            raise ConfigError(describe_lack(self._ray, self._asked))
        if waited >= self._tell_at:
            self._tell_at = waited + _TELL_S
            hope = "an autoscaler may bring machines" if grows else "others may end"
            logger.warning(
                "%s Waiting for %.0f s so far, since %s.",
                describe_lack(self._ray, self._asked),
                waited,
                hope,
            )


def await_room(ray: Any, asked: Asked, is_placed: Callable[[float], bool]) -> None:
    """Block until there is room.

    Args:
        ray: The module, connected.
        asked: What waits.
        is_placed: Waits for at most so many seconds; returns whether there is room now.

    Raises:
        ConfigError: There will be none.
    """
    watch = RoomWatch(ray, asked)
    while not is_placed(1.0):
        watch.check()
