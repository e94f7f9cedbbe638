"""The pretended device refuses what a device would, and computes what a CPU does."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.accelerators.pretended_gpu import DEVICE, DeviceMismatchError, pretending
from vllm.v1.attention.ops.triton.pages import write_slots


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretending(monkeypatch):
        yield


def test_values_are_where_they_were_made_and_moved() -> None:
    far = torch.arange(4, device=DEVICE)
    assert far.device == DEVICE
    assert (far + 1).device == DEVICE
    assert far[1:].cpu().device == torch.device("cpu")
    assert (far * torch.tensor(2)).tolist() == [0, 2, 4, 6]
    host = torch.zeros(4)
    moved = host.to(DEVICE)
    host[0] = 1
    assert moved.tolist() == [0, 0, 0, 0]
    moved[1:3] = 5
    assert moved[torch.tensor([0, 1])].tolist() == [0, 5]


@pytest.mark.parametrize(
    "mix",
    [
        lambda far, near: far + near,
        lambda far, near: torch.cat([near, far]),
        lambda far, near: near[far.long()],
        lambda far, near: torch.nn.functional.embedding(near.long(), far.view(4, 1)),
        lambda far, near: far.masked_fill_(near > 0, 1.0),
        lambda far, near: far.numpy(),
        lambda far, near: far.pin_memory(),
        lambda far, near: far.view(1, 2, 2) @ near.view(1, 2, 2),
        lambda far, near: write_slots(far.view(1, 1, 4), near.int()[:1], far.view(1, 4)),
    ],
)
def test_memory_of_both_sides_in_one_operator_is_refused(
    mix: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    with pytest.raises(DeviceMismatchError):
        mix(torch.ones(4, device=DEVICE), torch.ones(4))
