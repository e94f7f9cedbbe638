"""When a grammar advances."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ModelConfig, VllmConfig
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
