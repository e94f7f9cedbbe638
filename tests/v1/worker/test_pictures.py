"""Rows of pictures in a worker."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.v1.attention.metadata import RequestSlice
from vllm.v1.core.sched.tower_orders import TowerOrder
from vllm.v1.worker.pictures import PictureRows
from vllm.v1.worker.request_pictures import Picture, RequestPictures


class Tower:
    """Makes two rows, when it may."""

    def __init__(self) -> None:
        self.may_end, self.count = threading.Event(), 0

    def encode(self, pixels: torch.Tensor, keep_going: Callable[[], None]) -> torch.Tensor:
        self.may_end.wait(30)
        self.count += 1
        return torch.full((2, 3), float(self.count))


def test_a_worker_that_is_behind_waits_and_tells_of_it_later() -> None:
    """The first of several workers says that a picture is made; another may still make it."""
    tower = Tower()
    plan: Any = SimpleNamespace(tower=SimpleNamespace(out_width=3))
    rows = PictureRows(plan, tower, has_axes=False)  # type: ignore[arg-type]
    pixels = np.zeros((2, 2, 3), np.uint8)
    output: Any = SimpleNamespace(
        free_encoder_mm_hashes=[],
        scheduled_encoder_inputs={},
        dropped_orders=[],
        tower_orders=[TowerOrder("a", {"pixels": pixels})],
    )
    rows.update(output, lambda _: None)  # type: ignore[arg-type,return-value]
    assert rows.take_made() == []
    state: Any = SimpleNamespace(pictures=RequestPictures([Picture("a", 1, (1, 2), pixels)], 5))
    threading.Timer(0.02, tower.may_end.set).start()
    found = rows.build([(state, RequestSlice(0, 4, ()))])
    assert found is not None
    assert found.rows.tolist() == [1, 2]
    assert found.values.tolist() == [[1.0] * 3] * 2
    assert tower.count == 1
    assert rows.take_made() == [("a", True)]
    # A drafter's row reads the token behind it.
    ahead = rows.build([(state, RequestSlice(0, 4, ()))], 1)
    assert ahead is not None
    assert ahead.rows.tolist() == [0, 1]
    rows.close()
