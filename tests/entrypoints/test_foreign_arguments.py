"""Arguments of ``LLM`` that the engine has no field for."""

import logging
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.foreign_arguments import take_engine_arguments
from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.v1.engine.engine_args import EngineArgs


def test_what_changes_no_answer_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    given = {"seed": 3, "swap_space": 4, "enable_lora": False, "task": "generate", "device": None}
    with caplog.at_level(logging.WARNING):
        assert take_engine_arguments(given) == {"seed": 3}
    assert [record.getMessage().split()[0] for record in caplog.records] == ["swap_space"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"enable_lora": True}, "enable_lora=True is not supported yet: leave it out"),
        ({"runner": "pooling"}, "runner='pooling' is not supported yet"),
        ({"max_modle_len": 9}, "no argument of the engine: did you mean max_model_len"),
        ({"foo": 1}, "foo=1 is no argument"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        take_engine_arguments(given)


def test_paths_are_taken_for_texts() -> None:
    folder = Path(resolve_checkpoint("deepseek-v4").path)
    args = EngineArgs(model=folder, tokenizer=folder)  # type: ignore[arg-type]
    assert (args.model, args.tokenizer) == (str(folder), str(folder))


def test_an_object_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides=\[1\] must be a dictionary"):
        EngineArgs(hf_overrides=[1]).create_vllm_config()  # type: ignore[arg-type]
