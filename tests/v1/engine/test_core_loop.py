import threading
import time
from dataclasses import replace

import msgspec
import pytest

from tests.v1.engine.fakes import build_fake_core
from tests.v1.engine.test_core import request
from vllm.config.parallel import ParallelConfig
from vllm.exceptions import InvariantError, UserInputError
from vllm.v1.engine.core_loop import CoreLoop, Progress
from vllm.v1.engine.data_parallel.ranks import make_rank_config
from vllm.v1.engine.questions import ResetCache
from vllm.v1.engine.wire import (
    AbortRequests,
    AddRequests,
    Answer,
    CoreStatus,
    RequestRejected,
    Shutdown,
    StepOutputs,
    WithdrawPrefixes,
)


@pytest.fixture
def loop(config):
    core = build_fake_core(config())
    sent: list[object] = []
    made = CoreLoop(core, sent.append, Progress())
    made.sent = sent
    made.core = core
    return made


def finished(sent) -> set[str]:
    steps = [m for m in sent if isinstance(m, StepOutputs)]
    return {o.request_id for m in steps for o in m.outputs.outputs if o.finished}


def test_requests_of_one_message_begin_together(loop, monkeypatch):
    """None is there for a step before all are: the others would miss what the first computes."""
    make = loop.core.make_request
    num_waiting: list[int] = []

    def watched(given):
        loop.run_once()  # a step between two of them
        num_waiting.append(loop.core.scheduler.get_num_unfinished_requests())
        return make(given)

    monkeypatch.setattr(loop.core, "make_request", watched)
    names = [f"r{i}" for i in range(8)]
    loop.submit(AddRequests([request(name, max_tokens=1) for name in names]))
    assert num_waiting == [0] * 8
    loop.run_once()
    assert finished(loop.sent) == set(names)


def test_one_that_is_refused_keeps_no_other_back(loop, monkeypatch):
    make = loop.core.make_request

    def picky(given):
        if given.request_id == "bad":
            raise UserInputError("no")
        return make(given)

    monkeypatch.setattr(loop.core, "make_request", picky)
    loop.submit(AddRequests([request(name, max_tokens=1) for name in ("a", "bad", "b")]))
    loop.run_once()
    assert finished(loop.sent) == {"a", "b"}
    assert [m.request_id for m in loop.sent if isinstance(m, RequestRejected)] == ["bad"]


def test_the_loop_serves_until_it_is_told_to_stop(loop):
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.submit(AddRequests([request("a")]))
    loop.submit(AddRequests([request("b", max_tokens=2)]))
    while finished(loop.sent) != {"a", "b"}:
        time.sleep(0.001)
    loop.submit(Shutdown())
    thread.join(120)
    assert not thread.is_alive()


def test_front_ends_hear_of_the_cache_before_a_step_runs(config):
    cores = replace(config(crash_at=1), parallel_config=ParallelConfig(data_parallel_size=2))
    cores = make_rank_config(cores, 0)
    sent: list[object] = []
    loop = CoreLoop(build_fake_core(cores), sent.append, Progress())
    loop.submit(AddRequests([request("a", prompt=range(100))]))
    with pytest.raises(RuntimeError, match="on fire"):
        loop.run_once()
    (told,) = sent
    assert isinstance(told, CoreStatus)
    assert told.num_running == 1
    assert any(told.stored.values())


def test_messages_are_handled_between_steps(loop):
    loop.submit(AddRequests([request("a", max_tokens=50)]))
    loop.run_once()
    loop.submit(AbortRequests(["a"]))
    loop.submit(ResetCache().to_message(7))
    loop.run_once()
    replies = [m for m in loop.sent if not isinstance(m, StepOutputs)]
    assert replies == [ResetCache().to_answer(7, True)]
    assert not loop.core.has_work()


def test_held_prompts_are_let_go(loop, monkeypatch):
    told = []
    loop.submit(WithdrawPrefixes(["a"]))
    loop.run_once()  # without a connector there is nothing to let go of
    monkeypatch.setattr(loop.core, "withdraw_prefixes", told.append)
    loop.submit(WithdrawPrefixes(["b", "c"]))
    loop.run_once()
    assert told == [["b", "c"]]


def test_the_core_warms_up_when_it_rests(loop, monkeypatch):
    warmed: list[str] = []
    timers = []

    class FakeTimer:
        def __init__(self, delay_s, function, args):
            self.delay_s, self.fire = delay_s, lambda: function(*args)

        def start(self):
            timers.append(self)

    monkeypatch.setattr("vllm.v1.engine.core_loop.threading.Timer", FakeTimer)
    monkeypatch.setattr(loop.core, "warm_up", lambda: warmed.append("warm"))
    loop.submit(AddRequests([request(max_tokens=3)]))
    loop.run_once()
    loop.submit_warm_up(1.5)
    timers.pop().fire()
    while loop.core.has_work():
        loop.run_once()
    assert not warmed
    (later,) = timers
    assert later.delay_s == 1.5
    later.fire()
    assert not warmed  # the loop's own thread does it
    loop.run_once()
    assert warmed == ["warm"]
    assert timers == [later]


def test_a_refused_request_harms_no_other(loop, monkeypatch):
    real = loop.core.add_request

    def add(request):
        if request.request_id == "bad":
            raise UserInputError("too big", "prompt")
        real(request)

    monkeypatch.setattr(loop.core, "add_request", add)
    loop.submit(AddRequests([request("bad")]))
    loop.submit(AddRequests([request("good", max_tokens=1)]))
    loop.run_once()
    (rejected,) = [m for m in loop.sent if isinstance(m, RequestRejected)]
    assert rejected.request_id == "bad"
    error = rejected.error.to_exception()
    assert (type(error), str(error), error.param) == (UserInputError, "too big", "prompt")
    assert finished(loop.sent) == {"good"}


def test_a_broken_invariant_is_not_a_refusal(loop, monkeypatch):
    def add(request):
        raise InvariantError("I2")

    monkeypatch.setattr(loop.core, "add_request", add)
    loop.submit(AddRequests([request()]))
    with pytest.raises(InvariantError):
        loop.run_once()


def test_progress_tells_work_from_rest(config):
    progress = Progress()
    core = build_fake_core(config())
    loop = CoreLoop(core, lambda message: None, progress)
    loop.submit(AddRequests([request(max_tokens=1)]))
    loop.run_once()
    assert progress.busy
    assert progress.count == 1
    thread = threading.Thread(target=loop.run)
    thread.start()
    while progress.busy:
        time.sleep(0.001)
    loop.submit(Shutdown())
    thread.join(120)


def test_of_several_front_ends_each_hears_its_own_and_one_the_statistics(config):
    core = build_fake_core(config())
    to_all: list[object] = []
    to_one: list[tuple[int, object]] = []
    loop = CoreLoop(core, to_all.append, Progress(), lambda client, m: to_one.append((client, m)))
    asked = [
        msgspec.structs.replace(request(f"of-{i}", max_tokens=1), client_index=i) for i in (1, 2)
    ]
    for index, each in enumerate(asked, start=1):
        loop.submit(AddRequests([each]), index)
    loop.submit(AbortRequests(["unknown"]), 2)
    loop.run_once()
    loop.submit(ResetCache().to_message(9), 2)
    loop.run_once()
    heard = {
        client: {
            o.request_id
            for c, m in to_one
            if c == client and isinstance(m, StepOutputs)
            for o in m.outputs.outputs
        }
        for client in (1, 2)
    }
    assert heard == {1: {"of-1"}, 2: {"of-2"}}
    counted = [c for c, m in to_one if isinstance(m, StepOutputs) and m.outputs.scheduler_stats]
    assert counted
    assert set(counted) == {1}
    assert [c for c, m in to_one if isinstance(m, Answer)] == [2]
    assert to_all == []
