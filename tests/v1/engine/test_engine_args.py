"""From flags to a resolved configuration."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.model_executor.models.decoder.building import wrap_text
from tests.model_executor.models.decoder.reference import gemma4_small, qwen3, qwen3_5
from vllm.config.vllm import VllmConfig
from vllm.exceptions import ConfigError, UnsupportedModelError, UserInputError
from vllm.model_executor.model_loader.resolve import read_hf_config, resolve_checkpoint
from vllm.model_executor.models.registry import resolve_model
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.engine_args import AsyncEngineArgs, EngineArgs
from vllm.v1.engine.input_processor import InputProcessor


def _parse(*arguments: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="deepseek-v4")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(arguments))


def test_no_flag_equals_the_dataclass_defaults() -> None:
    assert _parse() == EngineArgs()
    assert AsyncEngineArgs is EngineArgs


def test_flags_reach_their_configs() -> None:
    config = _parse(
        *("--served-model-name", "a", "b", "--dtype", "bfloat16", "--seed", "3"),
        *("--max-model-len", "1k", "--max-logprobs", "-1", "--load-format", "dummy"),
        *("--block-size", "64", "--gpu-memory-utilization", "0.5"),
        *("--kv-cache-memory-bytes", "64M", "--num-gpu-blocks-override", "2k"),
        *("--no-enable-prefix-caching", "--prefix-caching-hash-algo", "xxhash"),
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "4"),
        *("--scheduling-policy", "priority", "--max-num-queued-reqs", "9", "--disable-log-stats"),
    ).create_vllm_config()
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    assert model.served_model_names == ("a", "b")
    assert (model.dtype, model.seed, model.max_model_len) == ("bfloat16", 3, 1000)
    assert (model.max_logprobs, config.load_config.load_format) == (-1, "dummy")
    assert (cache.block_size, cache.gpu_memory_utilization) == (64, 0.5)
    assert (cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override) == (64 << 20, 2000)
    assert (cache.enable_prefix_caching, cache.prefix_caching_hash_algo) == (False, "xxhash")
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (512, 4)
    assert (scheduler.policy, scheduler.max_num_queued_reqs) == ("priority", 9)
    assert not config.observability_config.log_stats


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--mamba-cache-mode", "all", "retention-interval"),
        ("--mamba-cache-dtype", "bfloat16", "share pages with states"),
        ("--mamba-ssm-cache-dtype", "float16", "drifts"),
        ("--mamba-block-size", "528", "at every 32 tokens"),
    ],
)
def test_how_recurrent_states_are_kept_is_fixed(flag: str, value: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        _parse(flag, value).create_vllm_config()


def test_mtp_is_refused_by_name_where_no_block_is_run(tmp_path: Path) -> None:
    raw = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96},
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    args = EngineArgs(
        model=str(tmp_path),
        load_format="dummy",
        skip_tokenizer_init=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    with pytest.raises(ConfigError, match="method 'mtp' needs an MTP block"):
        args.create_vllm_config()


def test_flags_of_recurrent_states_that_say_what_is_done_are_taken() -> None:
    _parse(
        *("--mamba-cache-mode", "align", "--mamba-cache-dtype", "auto"),
        *("--mamba-ssm-cache-dtype", "float32", "--mamba-block-size", "32"),
    ).create_vllm_config()


def test_a_connectors_settings_are_checked_before_anything_starts() -> None:
    raw = {"kv_connector": "TcpConnector", "kv_role": "kv_consumer"}
    extra = {"kv_connector_extra_config": {"peers": "nobody"}}
    args = _parse("--kv-transfer-config", json.dumps(raw | extra))
    with pytest.raises(ConfigError, match="peers='nobody' is no list"):
        args.create_vllm_config()


def test_a_trace_of_what_other_servers_computed_is_refused() -> None:
    transfer = json.dumps({"kv_connector": "TcpConnector", "kv_role": "kv_consumer"})
    args = _parse("--cache-trace", "a.trace", "--kv-transfer-config", transfer)
    with pytest.raises(ConfigError, match=r"--cache-trace .* --kv-transfer-config") as refused:
        args.create_vllm_config()
    assert "\n" not in str(refused.value)


def test_pulling_of_neighbours_goes_with_what_moves_prefixes(tmp_path: Path) -> None:
    taking, other = (
        json.dumps({"kv_connector": name, "kv_role": "kv_consumer"})
        for name in ("TcpConnector", "ExampleConnector")
    )
    tiers = ("--prefix-cache-dir", str(tmp_path))
    for flags in ((), tiers):
        args = _parse("--warm-pull-bytes", "1G", *flags, "--kv-transfer-config", taking)
        assert args.create_vllm_config().kv_transfer_config is not None
        refused = _parse("--warm-pull-bytes", "1G", *flags, "--kv-transfer-config", other)
        with pytest.raises(ConfigError, match="ExampleConnector of --kv-transfer-config does not"):
            refused.create_vllm_config()
    with pytest.raises(ConfigError, match=r"--cache-trace.*leave one of"):
        _parse("--warm-pull-bytes", "1G", "--cache-trace", "a.trace").create_vllm_config()
    args = _parse("--warm-pull-bytes", "1G", "-dp", "2", "--data-parallel-backend", "ray")
    with pytest.raises(ConfigError, match=r"warm_pull_bytes=\d+ is not for"):
        args.create_vllm_config()


def test_ray_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.utils.ray_cluster.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package ray"):
        EngineArgs(data_parallel_backend="ray", data_parallel_size=2).create_vllm_config()
    with pytest.raises(ConfigError, match=r"distributed_executor_backend=.ray. needs"):
        EngineArgs(distributed_executor_backend="ray").create_vllm_config()
    EngineArgs(data_parallel_backend="ray").create_vllm_config()
    EngineArgs(data_parallel_size=2).create_vllm_config()


def _limits(config: VllmConfig) -> tuple[int, int]:
    return config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs


def test_derived_defaults() -> None:
    args = EngineArgs()
    config = args.create_vllm_config()
    assert config.cache_config.block_size == 32
    assert config.cache_config.enable_prefix_caching
    assert config.model_config.max_model_len == 16384
    assert config.model_config.is_embedded
    assert config.model_config.served_model_name == "deepseek-v4"
    assert _limits(config) == (2048, 128)
    assert args.describe_derived(config)["block_size"] == 32
    assert "block_size" not in EngineArgs(block_size=32).describe_derived(config)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"max_num_seqs": 4000}, (4000, 4000)),
        ({"max_num_batched_tokens": 64}, (64, 64)),
        ({"enable_chunked_prefill": False}, (16384, 128)),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, (2048, 128)),
    ],
)
def test_derived_limits_fit_what_is_given(given: dict[str, Any], limits: tuple[int, int]) -> None:
    assert _limits(EngineArgs(**given).create_vllm_config()) == limits


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"block_size": 16}, "32, 64, 128"),
        ({"block_size": 256}, "block_size=256"),
        ({"block_size": 0}, "block_size=0"),
        ({"dtype": "int8"}, "int8"),
        ({"max_model_len": 16385}, "16384"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_logprobs": -2}, "max_logprobs=-2"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ({"num_gpu_blocks_override": -1}, "num_gpu_blocks_override=-1"),
        ({"prefix_caching_hash_algo": "md5"}, "md5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 20}, "below"),
        ({"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, "chunked"),
        ({"scheduling_policy": "lifo"}, "lifo"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs=-1"),
        ({"max_num_queued_tokens": -1}, "max_num_queued_tokens=-1"),
        ({"load_format": "gguf"}, "gguf"),
        ({"tokenizer_mode": "mistral"}, "mistral"),
        ({"tensor_parallel_size": 0}, "at least 1"),
        (
            {"tensor_parallel_size": 3},
            "does not divide the model's num_attention_heads 4, o_groups",
        ),
        ({"tensor_parallel_size": 4}, "does not divide the model's o_groups 2:"),
        ({"distributed_executor_backend": "mpi"}, "'mpi' is unknown: use one of uni, mp, ray"),
        (
            {"distributed_executor_backend": "uni", "tensor_parallel_size": 2},
            "'uni' runs one worker, but 2",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"model": ""}, "empty"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"tokenizer": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_wrong_values_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
        EngineArgs(**wrong).create_vllm_config()


def test_config_json_can_be_overridden() -> None:
    rope = read_hf_config(resolve_checkpoint("deepseek-v4").path)["rope_scaling"]
    overrides = {"max_position_embeddings": 8192, "rope_scaling": {"factor": 2}}
    config = EngineArgs(hf_overrides=overrides).create_vllm_config().model_config
    assert config.max_model_len == 8192
    assert config.hf_config["rope_scaling"] == {**rope, "factor": 2}
    with pytest.raises(ConfigError, match="num_attention_heads"):
        EngineArgs(hf_overrides={"num_attention_heads": -1}).create_vllm_config()


def _write_config(folder: Path, **changes: Any) -> str:
    raw = read_hf_config(resolve_checkpoint("deepseek-v4").path)
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return str(folder)


def test_ends_of_answers_may_stand_in_the_text_part(tmp_path: Path) -> None:
    """Without a generation_config.json, that is all there is to end an answer."""
    text = qwen3_5(eos_token_id=[7, 9])
    raw, _ = wrap_text(text, {}, "Qwen3_5ForConditionalGeneration", "qwen3_5", "model.")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    args = EngineArgs(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    processor = InputProcessor(args.create_vllm_config(), None)
    prompt = processor.parse_prompt({"prompt_token_ids": [1, 2, 3]})
    params = processor.process("r", prompt, SamplingParams()).sampling_params
    assert params is not None
    assert params.eos_token_id == 7
    assert params.stop_token_ids == [9]


def test_placeholders_of_images_are_refused_in_prompts(tmp_path: Path) -> None:
    """Gemma 4's wrappers have no embedding for them; the text part alone takes them for tokens."""
    text = gemma4_small()
    raw, _ = wrap_text(text, {}, "Gemma4ForConditionalGeneration", "gemma4", "model.")
    args = EngineArgs(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)

    def process(config: dict[str, Any], *ids: int) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        processor = InputProcessor(args.create_vllm_config(), None)
        prompt = processor.parse_prompt({"prompt_token_ids": list(ids)})
        processor.process("r", prompt, SamplingParams())

    raw |= {"image_token_id": 7, "video_token_id": 8, "audio_token_id": 9}
    process(raw, 5, 6)
    process(text, 7, 8, 9)
    for placeholder in (7, 8, 9):
        with pytest.raises(UserInputError, match=f"token id {placeholder}, in whose place"):
            process(raw, 5, placeholder, 6)


def test_a_foreign_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model = _write_config(tmp_path, architectures=["BertForMaskedLM"])
    with pytest.raises(UnsupportedModelError, match="BertForMaskedLM"):
        EngineArgs(model=model).create_vllm_config()


@pytest.mark.parametrize(
    ("name", "value"), [("vocab_size", -4), ("architectures", "DeepseekV4"), ("architectures", [1])]
)
def test_a_broken_model_config_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    model = _write_config(tmp_path, **{name: value})
    with pytest.raises(ConfigError, match=f"'{name}' is {re.escape(repr(value))}"):
        EngineArgs(model=model).create_vllm_config()


def test_yarn_by_an_override_serves_longer_prompts(tmp_path: Path) -> None:
    """As the authors of Qwen 3 advise; the resolved config reads the same once more."""
    raw = qwen3(max_position_embeddings=2560)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    given = {"model": str(tmp_path), "load_format": "dummy", "max_model_len": 8000}
    with pytest.raises(ConfigError, match="context of 2560"):
        EngineArgs(**given).create_vllm_config()
    config = EngineArgs(**given, hf_overrides={"rope_scaling": yarn}).create_vllm_config()
    assert config.model_config.max_model_len == 8000
    again = resolve_model(raw["architectures"]).parse_config(config.model_config.hf_config)
    assert (again.max_position_embeddings, again.layers[0].rope.factor) == (8192, 4.0)


def _rates_as_transformers_writes_them(hca: int) -> dict[str, Any]:
    kinds = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = read_hf_config(resolve_checkpoint("deepseek-v4").path)["compress_ratios"]
    return {
        "compress_ratios": None,
        "layer_types": [kinds.get(ratio, "sliding_attention") for ratio in ratios],
        "compress_rates": {kinds[4]: 4, kinds[128]: hca},
    }


@pytest.mark.parametrize(
    ("changes", "allowed", "refused"),
    [
        ({}, ("32", 64, "128", 256, "none", "auto", 0), ("33", 16, "-128", "often")),
        ({"compress_ratios": [0, 4, 64, 4, 64, 4, 0]}, (32, 64, 192), (16, 48)),
        (_rates_as_transformers_writes_them(64), (32, 64, 192), (16, 48)),
    ],
)
def test_an_interval_is_any_multiple_of_the_unit_whatever_the_compress_rates(
    changes: dict[str, Any],
    allowed: tuple[str | int, ...],
    refused: tuple[str | int, ...],
    tmp_path: Path,
) -> None:
    model = _write_config(tmp_path, **changes)
    args = EngineArgs(model=model, load_format="dummy", block_size=32)
    for interval in allowed:
        args.prefix_cache_retention_interval = interval
        config = args.create_vllm_config()
        assert config.cache_config.prefix_cache_retention_interval == interval
    for interval in refused:
        args.prefix_cache_retention_interval = interval
        with pytest.raises(ConfigError, match=rf"prefix_cache_retention_interval='?{interval}"):
            args.create_vllm_config()


def test_a_pinned_share_needs_pins_and_is_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(prefix_cache_pinned_share=0.5)
    with pytest.raises(ConfigError, match=r"prefix_cache_pinned_share=0\.5 .* VLLM_PIN_SWA_TOKENS"):
        args.create_vllm_config()
    monkeypatch.setenv("VLLM_PIN_SWA_TOKENS", "1")
    assert args.create_vllm_config().cache_config.prefix_cache_pinned_share == 0.5
    args.prefix_cache_pinned_share = 1.5
    with pytest.raises(
        ConfigError, match=r"prefix_cache_pinned_share=1\.5 must be between 0 and 1"
    ):
        args.create_vllm_config()


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    config = EngineArgs(tokenizer=str(tmp_path), tokenizer_mode="deepseek_v4").create_vllm_config()
    assert config.model_config.tokenizer == str(tmp_path)


@pytest.mark.slow
def test_resolving_loads_no_tensor_library() -> None:
    code = (
        "import sys; from importlib import metadata; from vllm import EngineArgs;"
        # As where torch was built for GPUs.
        "real = metadata.version;"
        "metadata.version = lambda name: '2.9.0' if name == 'torch' else real(name);"
        "transfer = {'kv_connector': 'TcpConnector', 'kv_role': 'kv_consumer'};"
        "EngineArgs(kv_transfer_config=transfer).create_vllm_config();"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
