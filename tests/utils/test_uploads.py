"""Host memory that a device may still be reading is not written."""

import torch

from vllm.utils.uploads import StagingBuffers


class _Event:
    """A device that makes copies only when somebody waits for them."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record(self) -> None:
        self._log.append(f"copy of {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait for {self._name}")


def test_a_buffer_waits_for_its_own_last_copy_before_it_is_written() -> None:
    log: list[str] = []
    names = iter("ab")
    device = torch.device("cpu")
    staging = StagingBuffers((4,), torch.int32, device, lambda: _Event(log, next(names)))
    target = torch.zeros(4, dtype=torch.int32)
    for value in (1, 2, 3):
        buffer = staging.take()
        log.append("written")
        buffer.fill_(value)
        staging.send(buffer[:3], target[:3])
        assert target.tolist() == [value, value, value, 0]
    one, other = log[2][-1], log[5][-1]
    assert {one, other} == {"a", "b"}
    assert log == [
        line
        for name in (one, other, one)
        for line in (f"wait for {name}", "written", f"copy of {name}")
    ]


def test_without_events_buffers_take_turns() -> None:
    staging = StagingBuffers((2,), torch.int64, torch.device("cpu"))
    first, second = staging.take(), staging.take()
    assert first.data_ptr() != second.data_ptr()
    assert staging.take().data_ptr() == first.data_ptr()
