"""When a grammar advances."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.config import ModelConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.engine_args import EngineArgs
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request_options import RequestOptions
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
        assert not manager.warm_up().result(200).matcher.is_error()
        # The same compiler, which has it already.
        assert manager.warm_up().done()
    finally:
        manager.shutdown()


def test_an_answer_ends_by_the_tokens_that_its_grammar_ends_by() -> None:
    """generation_config.json says them, and what config.json says besides is no end to either."""
    config = EngineArgs().create_vllm_config()
    model = config.model_config
    model.hf_config["eos_token_id"] = [1, 33]
    for given, ends in ((1, {1}), ([1, 33], {1, 33}), ([7], {1, 7}), (None, {1, 33})):
        model.generation_config["eos_token_id"] = given
        manager = StructuredOutputManager(config)
        tokenizer = Tokenizer.from_folder(manager._tokenizer_path)
        processor = InputProcessor(config, tokenizer)
        params = SamplingParams(max_tokens=1)
        prompt = processor.parse_prompt([5])
        found = processor.process("q", prompt, params, RequestOptions()).sampling_params
        assert found is not None
        assert found.stop_token_ids is not None
        assert {found.eos_token_id, *found.stop_token_ids} == manager._end_ids == ends
