"""When a grammar advances."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.structured_output import StructuredOutputManager


@pytest.mark.parametrize(
    ("structured", "advances"),
    [
        (None, False),
        (SimpleNamespace(grammar=None, reasoning_ended=None), False),
        (SimpleNamespace(grammar="g", reasoning_ended=None), True),
        (SimpleNamespace(grammar="g", reasoning_ended=True), True),
        (SimpleNamespace(grammar="g", reasoning_ended=False), False),
    ],
)
def test_should_advance(structured: Any, advances: bool) -> None:
    manager = StructuredOutputManager(VllmConfig(model_config=ModelConfig("test")))
    request: Any = SimpleNamespace(structured_output_request=structured)
    assert manager.should_advance(request) is advances


@pytest.mark.slow
def test_what_is_warm_is_what_requests_get() -> None:
    manager = StructuredOutputManager(EngineArgs().create_vllm_config())
    try:
        assert not manager.warm_up().result(200).is_error()
        # The same compiler, which has it already.
        assert manager.warm_up().done()
    finally:
        manager.shutdown()
