"""What the front end does with cores on a cluster; tests/ray_serve has them on a real one."""

import pytest

from tests.v1.engine.fakes import FAKE_CORE
from vllm.exceptions import ConfigError
from vllm.utils.ray_cluster import Environment, check_environments, describe_environment
from vllm.v1.engine.process_client import ProcessCore, on_this_clock
from vllm.v1.engine.wire import StepOutputs
from vllm.v1.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)


def test_an_address_of_another_machine_is_told(config) -> None:
    with pytest.raises(ConfigError, match=r"data_parallel_address='192.0.2.77' is no address"):
        ProcessCore(config(), FAKE_CORE, tcp_host="192.0.2.77", spawn=lambda order: None)


def test_times_of_another_clock_become_ours() -> None:
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 9.0)
    outputs = EngineCoreOutputs([EngineCoreOutput("r", [1], events=[event])], timestamp=10.0)
    moved = on_this_clock(StepOutputs(outputs)).outputs
    assert moved.timestamp > 100.0
    assert moved.timestamp - moved.outputs[0].events[0].timestamp == pytest.approx(1.0)


def test_another_environment_is_refused_by_name() -> None:
    own = describe_environment("10.0.0.1")
    check_environments([own, own._replace(machine="10.0.0.2")])
    other = Environment("10.0.0.3", "0.0.1", own.python)
    with pytest.raises(ConfigError, match=r"machine 10\.0\.0\.3 .* vllm 0\.0\.1 on Python"):
        check_environments([own, other])
