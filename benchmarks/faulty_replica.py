"""A replica of a fleet whose updates get lost, doubled, reordered or late, for ``fleet_live``.

Faults are files in the folder that ``VLLM_FLEET_FAULTS`` names: ``KIND-NUMBER.order`` happens to
the replica that takes it away first, with its next updates. What replicas take is written down
beside.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from vllm.ray_serve.placement import Only, Place
from vllm.ray_serve.replica import EngineReplica, Taken, Updates
from vllm.v1.messages import EngineCoreRequest

FOLDER = "VLLM_FLEET_FAULTS"
NEWS_FAULTS = ("lose", "lose-one", "double", "swap", "late", "partition", "error")
# A front end gives an answer up after five seconds.
_PARTITION_S = 7.0
_LATE_S = 1.5


class FaultyReplica(EngineReplica):
    """Serves as it should, and tells of its cache as it is ordered to."""

    # Until its updates begin; ``__init__`` is Serve's to await.
    _held_back: Sequence[bytes] = ()

    async def updates(self, to: Only, listener: str) -> Updates:
        """Return what is new, unless a fault is ordered.

        Raises:
            RuntimeError: That is the fault.
        """
        updates = await super().updates(to, listener)
        messages = [*updates.messages, *self._held_back]
        self._held_back = ()
        fault = self._take_fault() if messages else None
        if fault == "lose":
            messages = []
        elif fault == "lose-one":
            del messages[len(messages) // 2]
        elif fault == "double":
            messages += messages
        elif fault == "swap":
            # What came first goes last: behind what is still to come, where it is alone.
            messages, self._held_back = messages[1:][::-1], messages[:1]
        elif fault == "late":
            await asyncio.sleep(_LATE_S)
        elif fault == "partition":
            await asyncio.sleep(_PARTITION_S)
        elif fault == "error":
            raise RuntimeError("the updates were lost on their way")
        return Updates(updates.replica, messages)

    def _take_fault(self) -> str | None:
        for path in sorted(Path(os.environ[FOLDER]).glob("*-*.order")):
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            return path.stem.rpartition("-")[0]
        return None

    async def generate(self, place: Place, data: bytes) -> AsyncIterator[Taken | bytes]:
        """Run a request, and write down that it was taken here."""
        name = msgspec.msgpack.decode(data, type=EngineCoreRequest).request_id
        line = json.dumps([name, time.time(), self._name])
        with (Path(os.environ[FOLDER]) / f"{self._name}.taken").open("a") as file:
            file.write(line + "\n")
        async for item in super().generate(place, data):
            yield item
