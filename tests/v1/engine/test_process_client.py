import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.v1.engine.fakes import FAKE_CORE
from tests.v1.engine.test_core import request
from vllm.exceptions import CheckpointError, EngineDeadError, EngineError, PoolTooSmallError
from vllm.v1.engine.process_client import ProcessCore
from vllm.v1.engine.questions import ResetCache
from vllm.v1.engine.wire import (
    AddRequests,
    Answer,
    Dead,
    StepOutputs,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def launch(config, monkeypatch):
    """Launch fake cores in processes; all are stopped at the end."""
    cores = []

    def start(timeout_s=30.0, use_tcp=False, **fake):
        monkeypatch.setenv("VLLM_ENGINE_HEARTBEAT_TIMEOUT", str(timeout_s))
        cores.append(ProcessCore(config(**fake), FAKE_CORE, use_tcp=use_tcp))
        return cores[-1]

    yield start
    for core in cores:
        core.shutdown()


def outputs_until_finished(core):
    tokens = []
    while True:
        message = core.next_message()
        assert isinstance(message, StepOutputs), message
        for output in message.outputs.outputs:
            tokens.extend(output.new_token_ids)
            if output.finished:
                return tokens


@pytest.mark.parametrize("use_tcp", [False, True])
def test_a_core_in_a_process_serves_and_stops(launch, use_tcp):
    core = launch(use_tcp=use_tcp)
    ready = core.wait_ready()
    assert ready.pid == core.pid != os.getpid()
    assert ready.kv_cache.num_blocks == 64
    core.send(AddRequests([request(max_tokens=5)]))
    assert len(outputs_until_finished(core)) == 5
    core.send(ResetCache().to_message(3))
    while not isinstance(message := core.next_message(), Answer):
        pass
    assert message == ResetCache().to_answer(3, True)
    assert core.dead_error is None
    core.shutdown()
    assert not psutil.pid_exists(core.pid)
    assert core.dead_error is None
    core.shutdown()


def test_the_channel_folder_is_private_and_removed(launch):
    core = launch()
    folder = Path(core._channel._folder)
    core.wait_ready()
    assert folder.stat().st_mode & 0o777 == 0o700
    core.shutdown()
    assert not folder.exists()


def test_launching_returns_before_the_core_is_ready(launch):
    began = time.monotonic()
    core = launch(start_s=1.0)
    launched_s = time.monotonic() - began
    # Counted from the launch on: a launch that waits takes longer.
    assert core.wait_ready().start_s > max(1.0, launched_s)


@pytest.mark.parametrize(
    ("fake", "error", "match"),
    [
        ({"start_error": "checkpoint"}, CheckpointError, "embed.weight is missing"),
        ({"num_blocks": 2}, PoolTooSmallError, "max seq len"),
        ({"start_error": "bug"}, EngineError, "RuntimeError: a bug"),
    ],
)
def test_start_errors_arrive_as_they_were(launch, capfd, fake, error, match):
    core = launch(**fake)
    with pytest.raises(error, match=match) as raised:
        core.wait_ready()
    assert type(raised.value) is error
    with pytest.raises(error, match=match):
        core.wait_ready()
    assert not psutil.pid_exists(core.pid)
    # Errors that users can act on come without the traceback of another process.
    assert ("Traceback" in capfd.readouterr().err) == (error is EngineError)


def test_a_core_killed_while_starting_is_noticed(launch):
    core = launch(start_s=30)
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="signal 9"):
        core.wait_ready()


def test_a_killed_core_is_noticed_at_once(launch):
    # Its silence would tell after an hour.
    core = launch(step_s=0.01, timeout_s=3600)
    core.wait_ready()
    core.send(AddRequests([request(max_tokens=200)]))
    assert isinstance(core.next_message(), StepOutputs)
    os.kill(core.pid, signal.SIGKILL)
    while not isinstance(message := core.next_message(), Dead):
        pass
    assert "signal 9" in message.message
    assert "signal 9" in str(core.dead_error)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"crash_at": 2}, "the device is on fire"),
        ({"timeout_s": 1.0, "hang_at": 2}, "made no progress for 1 s"),
    ],
    ids=["raises", "hangs"],
)
def test_a_step_that_fails_ends_the_core_with_its_reason(launch, faults, reason):
    core = launch(**faults)
    core.wait_ready()
    core.send(AddRequests([request(max_tokens=9)]))
    while not isinstance(message := core.next_message(), Dead):
        pass
    assert reason in message.message
    core.shutdown()
    assert not psutil.pid_exists(core.pid)


def test_a_core_whose_messages_cannot_be_read_is_dead(launch):
    core = launch()
    core.wait_ready()
    core._deliver(b"\xc1")
    assert "cannot be read" in core.next_message().message
    assert "cannot be read" in str(core.dead_error)


def test_a_process_that_exits_by_itself_is_noticed(launch):
    core = launch(exit_at=1)
    core.wait_ready()
    core.send(AddRequests([request()]))
    assert "status 7" in core.next_message().message


def test_a_frozen_process_is_noticed(launch):
    core = launch(timeout_s=1.0)
    core.wait_ready()
    os.kill(core.pid, signal.SIGSTOP)
    assert "no heartbeat" in core.next_message().message


def test_a_core_without_work_tells_that_a_worker_is_gone(launch):
    core = launch(timeout_s=1.0, fault="rank 1 was ended by signal 9")
    core.wait_ready()
    assert "rank 1 was ended by signal 9" in core.next_message().message
    core.shutdown()
    assert not psutil.pid_exists(core.pid)


def test_an_idle_core_lives_on(launch):
    core = launch(timeout_s=2.0)
    core.wait_ready()
    time.sleep(3.0)
    assert core.dead_error is None
    core.send(AddRequests([request(max_tokens=2)]))
    assert len(outputs_until_finished(core)) == 2


def test_signals_of_a_whole_process_group_do_not_end_the_core(launch):
    core = launch()
    core.wait_ready()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(core.pid, number)
    core.send(AddRequests([request(max_tokens=2)]))
    assert len(outputs_until_finished(core)) == 2


ORPHAN_MAKER = """
import os, sys, pathlib
from tests.v1.engine.fakes import FAKE_CORE, make_config
from vllm.v1.engine.process_client import ProcessCore
core = ProcessCore(make_config(pathlib.Path(sys.argv[1]), hang_at=1), FAKE_CORE)
core.wait_ready()
print(core.pid, core._channel._folder, flush=True)
if sys.argv[2] == "stopped":
    os.kill(core.pid, 19)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_core_does_not_outlive_its_front_end(tmp_path, state):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN_MAKER, str(tmp_path), state],
        stdout=subprocess.PIPE,
        env=env,
        check=False,
        timeout=60,
    )
    pid, folder = int(done.stdout.split()[0]), Path(done.stdout.split()[1].decode())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not folder.exists()


def test_only_workers_load_torch():
    """Neither the front end nor the core itself does, which a core with fake workers needs."""
    code = (
        "import sys, vllm.v1.engine.async_llm, vllm.v1.engine.launch, vllm.v1.engine.llm_engine;"
        "import tests.v1.engine.fakes;"
        "print([m for m in ('torch', 'pydantic', 'transformers') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert out.stdout.strip() == b"[]"
