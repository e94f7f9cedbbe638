"""Faults on the wire: none passes for rows, none hangs a request, none loses a block."""

import pytest

from benchmarks.transfer_faults import EVENTS, FRAME_FAULTS, Violation, inject
from vllm.distributed.kv_transfer.handover.frames import Buffer, Head
from vllm.distributed.kv_transfer.handover.pulling import Load, Outcome
from vllm.distributed.kv_transfer.handover.serving import Frame


def test_faults_never_pass_for_rows() -> None:
    report = inject(400, seed=7)
    assert set(report.injected) == {*FRAME_FAULTS, *EVENTS}
    assert report.outcomes["loaded"] > 50
    assert report.outcomes["recomputed"] > 50
    assert report.num_dropped_frames > 10


class _TrustsTheWire(Load):
    """Takes rows without looking at their digest."""

    def _take_rows(self, head: Head, payload: Buffer | None, now: float) -> list[Frame]:
        if self._incoming is not None:
            self._missing.discard(head.index)
            if not self._missing:
                self.outcome = Outcome(True)
        return []


class _NeverGivesUp(Load):
    """Knows no deadline."""

    def fail(self, reason: str) -> None:
        self.retry_at += 1.0


@pytest.mark.parametrize("load_class", [_TrustsTheWire, _NeverGivesUp])
def test_what_is_played_here_catches_a_load_that_is_too_trusting(load_class: type[Load]) -> None:
    with pytest.raises(Violation):
        inject(400, seed=7, load_class=load_class)
