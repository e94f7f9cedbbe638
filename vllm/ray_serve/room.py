"""Room for a fleet's replicas on the cluster; Serve by itself waits for it without end."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import ray

from vllm.utils.ray_room import Asked, RoomWatch, await_room, read_machines

_POLL_S = 1.0


def await_machines(asked: Asked) -> None:
    """Wait until the cluster's machines are large enough, whatever runs there now.

    Does nothing where this process is not connected to a cluster yet.

    Raises:
        ConfigError: They are not, and no autoscaler will bring more.
    """
    if ray.is_initialized():
        await_room(ray, asked, lambda seconds: _fits_within(asked, seconds))


def _fits_within(asked: Asked, seconds: float) -> bool:
    if asked.fits(read_machines(ray)):
        return True
    time.sleep(seconds)
    return False


async def start_with_room(start: Coroutine[Any, Any, None], watch: RoomWatch) -> None:
    """Await the start of what needs a replica, as long as one has a place or may get one.

    Raises:
        ConfigError: None will get a place.
    """
    starting = asyncio.ensure_future(start)
    try:
        while not (await asyncio.wait([starting], timeout=_POLL_S))[0]:
            await asyncio.to_thread(watch.check)
        await starting
    finally:
        starting.cancel()


def is_placed(app: str, deployment: str) -> bool:
    """Return whether a replica of a deployment has a place: its actor runs, ready or not."""
    # Serve's names of its actors; what it tells does not part those that wait for a place from
    # those that load a model.
    prefix = f"SERVE_REPLICA::{app}#{deployment}#"
    actors = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["name"].startswith(prefix):
            try:
                actors.append(ray.get_actor(entry["name"], namespace=entry["namespace"]))
            except ValueError:
                # It ended meanwhile.
                continue
    if not actors:
        return False
    ready, _ = ray.wait([actor.__ray_ready__.remote() for actor in actors], timeout=_POLL_S)
    return bool(ready)
