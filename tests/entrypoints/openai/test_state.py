"""Phases of the server."""

import pytest

from vllm.entrypoints.openai.state import Phase, ServerState
from vllm.exceptions import EngineDeadError, EngineError, ShuttingDownError


class _Stream:
    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


async def test_phases() -> None:
    state = ServerState()
    with pytest.raises(ShuttingDownError):
        state.check_open()
    state.set_ready()
    state.check_open()
    state.start_drain()
    state.set_ready()  # the engine came up in a drain: too late
    phases = [state.phase]
    with pytest.raises(ShuttingDownError):
        state.check_open()
    state.set_dead("why")
    state.start_drain()
    phases.append(state.phase)
    assert phases == [Phase.DRAINING, Phase.DEAD]
    with pytest.raises(EngineDeadError):
        state.check_open()


async def test_end_all_reaches_running_and_later_streams() -> None:
    state = ServerState()
    running, gone, late = _Stream(), _Stream(), _Stream()
    state.add_running(running)
    state.add_running(gone)
    state.discard_running(gone)
    error = EngineError("x")
    state.end_all(error)
    assert running.errors == [error]
    assert gone.errors == []
    with pytest.raises(EngineError):
        state.add_running(late)


async def test_idle_means_no_open_request() -> None:
    state = ServerState()
    assert await state.wait_idle(0.01)
    with state.open_request(), state.open_request():
        assert state.num_open_requests == 2
        assert not await state.wait_idle(0.01)
    assert await state.wait_idle(0.01)
