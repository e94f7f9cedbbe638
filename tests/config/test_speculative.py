"""What ``--speculative-config`` takes and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny_checkpoint import make_tensors, tiny_config, write_checkpoint
from tests.v1.spec_decode.tiny_engine import make_core
from vllm.config.speculative import SpeculativeConfig
from vllm.exceptions import CheckpointError, ConfigError
from vllm.v1.engine.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "method None"),
        ({"method": "eagle"}, "eagle"),
        ({"method": "none", "num_speculative_tokens": 3}, '{"method": "none"} alone'),
        ({"method": "mtp", "draft_length": 2}, "draft_length"),
        ({"method": "mtp", "num_speculative_tokens": 5}, "1 to 4"),
        ({"method": "mtp", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "mtp", "num_speculative_tokens": True}, "must be a number"),
        ({"method": "mtp", "prompt_lookup_max": 3}, "ngram"),
        ({"method": "mtp", "model": "other"}, "other"),
        ({"method": "mtp", "stale_row": "burn"}, "rebuild, keep, drop"),
        ({"method": "ngram", "stale_row": "keep"}, "mtp"),
        ({"method": "ngram", "num_speculative_tokens": 33}, "1 to 32"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "must be a number"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
    ],
)
def test_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(speculative_config=raw).create_vllm_config()


def test_the_drafter_under_its_familys_name() -> None:
    raw = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
    assert SpeculativeConfig.from_dict(raw) == SpeculativeConfig.from_dict({**raw, "method": "mtp"})


def test_a_block_may_be_in_a_gguf_file_of_its_own() -> None:
    raw = {"method": "deepseek_mtp", "model": "mtp-v4.gguf"}
    assert SpeculativeConfig.from_dict(raw).drafts_file == "mtp-v4.gguf"
    assert SpeculativeConfig.from_dict({"method": "mtp"}).drafts_file is None
    with pytest.raises(ConfigError, match="there are no separate draft models but"):
        SpeculativeConfig.from_dict({"method": "ngram", "model": "mtp-v4.gguf"})
    with pytest.raises(ConfigError, match="drafts for a model in a GGUF file"):
        EngineArgs(speculative_config=raw).create_vllm_config()


def test_lookup_bounds_follow_one_another() -> None:
    config = SpeculativeConfig.from_dict({"model": "[ngram]", "prompt_lookup_max": 1})
    assert (config.method, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 1, 1)
    for given, weighs, number, longest, shortest in (
        ({}, True, 8, 8, 1),
        ({"num_speculative_tokens": 3}, False, 3, 4, 2),
    ):
        config = SpeculativeConfig.from_dict({"method": "ngram", **given})
        assert (config.weighs_drafts, config.num_speculative_tokens) == (weighs, number)
        assert config.usual_drafts == (0 if weighs else number)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (shortest, longest)
    config = SpeculativeConfig.from_dict({"method": "ngram", "prompt_lookup_min": 6})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (6, 6)


def test_engine_args_hand_it_on() -> None:
    raw = {"method": "mtp", "num_speculative_tokens": 2}
    config = EngineArgs(speculative_config=raw).create_vllm_config()
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == config.usual_drafts == 2
    assert not config.may_draft


def test_the_platform_may_choose_where_nobody_did() -> None:
    for given, may_draft in (
        ({}, True),
        ({"speculative_config": {"method": "none"}}, False),
        ({"async_scheduling": True}, False),
    ):
        config = EngineArgs(**given).create_vllm_config()  # type: ignore[arg-type]
        assert config.speculative_config is None
        assert config.may_draft == may_draft
    # No drafts take no step ahead away.
    both = EngineArgs(async_scheduling=True, speculative_config={"method": "none"})
    assert both.create_vllm_config().scheduler_config.async_scheduling
    unasked = SpeculativeConfig.unasked()
    assert (unasked.weighs_drafts, unasked.is_unasked, unasked.most_requests) == (True, True, 2)


def write_config(folder: Path, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps(tiny_config(**more)))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dspark_block_size": 5, "dspark_markov_rank": 256}, "DSpark drafter"),
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0"),
    ],
)
def test_mtp_is_refused_by_config_json_alone(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The folder has no weights: the refusal cannot come from them."""
    model = write_config(tmp_path, **fields)
    args = {"model": model, "skip_tokenizer_init": True, "max_model_len": 512}
    with pytest.raises(ConfigError, match=message) as refusal:
        EngineArgs(**args, speculative_config={"method": "mtp"}).create_vllm_config()
    assert "ngram" in str(refusal.value)
    EngineArgs(**args, speculative_config={"method": "ngram"}).create_vllm_config()


@pytest.mark.slow
def test_a_checkpoint_without_the_blocks_tensors_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = make_tensors(config)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    write_checkpoint(tmp_path, config, kept)
    with pytest.raises(CheckpointError, match=r"no mtp.* tensors"):
        make_core(tmp_path, {"method": "mtp"})
    make_core(tmp_path, {"method": "ngram"})
