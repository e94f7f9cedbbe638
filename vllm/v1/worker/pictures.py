"""Rows of pictures in a worker: made by the tower, kept by the scheduler's word, read by steps."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm.exceptions import InvariantError
from vllm.model_executor.towers.parts import go_on
from vllm.model_executor.towers.plans import ImagesPlan
from vllm.model_executor.towers.tower import Tower
from vllm.v1.attention.metadata import RequestSlice
from vllm.v1.attention.step_pictures import StepPictures
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.picture_store import PictureStore, make_rows
from vllm.v1.worker.request_pictures import Picture
from vllm.v1.worker.request_state import RequestState
from vllm.v1.worker.tower_thread import TowerThread


class PictureRows:
    """Rows of pictures.

    Owns: the rows that the scheduler wants kept, the thread that makes some beside the steps, and a
    count of the tower's seconds.

    Args:
        plan: How the model sees pictures.
        tower: Makes them.
        has_axes: Whether the model turns rows by number, row and column.
        store: Rows on a disk; None: there are none.
    """

    def __init__(
        self,
        plan: ImagesPlan,
        tower: Tower,
        *,
        has_axes: bool,
        store: PictureStore | None = None,
    ) -> None:
        self._tower, self._has_axes, self._store = tower, has_axes, store
        self._width = plan.tower.out_width
        self._thread = TowerThread(tower, torch.get_num_threads(), store)
        self._kept: dict[str, torch.Tensor] = {}
        # What nobody asked for in time: the last picture's.
        self._extra: tuple[str, torch.Tensor] | None = None
        self._seconds: dict[str, float] = {}
        # Taken from the thread, but nobody was told yet.
        self._untold: list[tuple[str, bool]] = []

    def update(self, output: SchedulerOutput, find_state: Callable[[str], RequestState]) -> None:
        """Drop what the scheduler lets go of, and make what it asks for."""
        for key in output.free_encoder_mm_hashes:
            self._kept.pop(key, None)
        for req_id, indices in output.scheduled_encoder_inputs.items():
            own = find_state(req_id).pictures
            assert own is not None, f"request {req_id} has pictures"
            for index in indices:
                picture = own.pictures[index]
                if picture.key not in self._kept:
                    self._kept[picture.key] = self._encode(picture)

        for key in output.dropped_orders:
            self._thread.drop(key)
        for order in output.tower_orders:
            self._thread.start(order.key, order.data["pixels"])

    def take_made(self) -> list[tuple[str, bool]]:
        """Drain what the thread has done: by key, whether there are rows now."""
        self._collect()
        untold, self._untold = self._untold, []
        return untold

    def _collect(self) -> None:
        made = self._thread.take()
        self._kept.update((key, rows) for key, rows in made if rows is not None)
        self._untold += [(key, rows is not None) for key, rows in made]

    def take_seconds(self) -> dict[str, float]:
        """Drain the seconds that the tower has run, by key, here or in the thread."""
        seconds, self._seconds = self._seconds, {}
        return seconds | self._thread.take_seconds()

    def bind_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the thread has done something."""
        self._thread.bind_wake(wake)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _encode(self, picture: Picture) -> torch.Tensor:
        begin = time.perf_counter()
        made = make_rows(self._tower, self._store, picture.key, picture.pixels, go_on)
        self._seconds[picture.key] = time.perf_counter() - begin
        return made

    def _find(self, picture: Picture) -> torch.Tensor:
        made = self._kept.get(picture.key)
        if made is None:
            self._thread.wait(picture.key)
            self._collect()
            made = self._kept.get(picture.key)
        if made is None:
            # The request that was to make them was taken out of its step.
            if self._extra is None or self._extra[0] != picture.key:
                self._extra = (picture.key, self._encode(picture))
            made = self._extra[1]
        expected = picture.end - picture.offset
        if made.shape != (expected, self._width):
            raise InvariantError(
                f"a tower made {tuple(made.shape)} rows of a picture of {expected} soft tokens"
            )
        return made

    def build(
        self, runs: Sequence[tuple[RequestState, RequestSlice]], ahead: int = 0
    ) -> StepPictures | None:
        """Return what pictures change in a step; None: no request has any.

        Args:
            runs: Its requests with their rows, which follow each other.
            ahead: By how many tokens what a row reads lies behind the row: 1 of a drafter.
        """
        if all(state.pictures is None for state, _ in runs):
            return None
        rows, values = [], []
        axes = np.empty((3, sum(item.num_tokens for _, item in runs)), dtype=np.int64)
        first = 0
        for state, item in runs:
            own = axes[:, first : first + item.num_tokens]
            if state.pictures is None:
                own[:] = np.arange(item.start, item.start + item.num_tokens)
            else:
                state.pictures.put_axes(item.start, own)
                begin = item.start + ahead
                end = begin + item.num_tokens
                for picture in state.pictures.find(begin, end):
                    low, high = max(begin, picture.offset), min(end, picture.end)
                    made = self._find(picture)
                    rows.append(np.arange(low, high) + first - begin)
                    values.append(made[low - picture.offset : high - picture.offset])
            first += item.num_tokens
        return StepPictures(
            torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)),
            torch.cat(values) if values else torch.empty(0, self._width),
            torch.from_numpy(axes) if self._has_axes else None,
        )
