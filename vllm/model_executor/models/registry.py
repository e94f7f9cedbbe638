"""Architecture name -> model class, config parser and cache specs; models load lazily."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.model_loader.shards import RankShare, ShardFinder


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Where the parts of an architecture are, as "module:name"; importing waits for use.

    Attributes:
        model: The model class; its module imports torch.
        config: Function (raw) -> the model's config; torch-free.
        kv_cache_specs: Function (config, block_size, cache_dtype, state_dtype) -> specs by cache
            name; torch-free.
        packs_weights: Whether matrices may be those of compressed-tensors, AWQ, GPTQ or FP8
            releases, by the names that the model asks for.
        shards: Module that says what a rank holds: ``find_shard(config, share, name)``,
            ``check_ranks(config, size, spreads_experts)``, ``cut_config(config, size)``;
            torch-free.
        block_sizes: The values of ``--block-size`` that suit the model, its default first.
    """

    model: str
    config: str
    kv_cache_specs: str
    block_sizes: str
    shards: str
    packs_weights: bool = False

    def load_model_class(self) -> Any:
        """Imports and returns the model class."""
        return _load(self.model)

    def parse_config(self, raw: Mapping[str, Any]) -> Any:
        """Parses a config.json object.

        Raises:
            ConfigError: A field is wrong.
        """
        return _load(self.config)(raw)

    def load_kv_cache_specs(self) -> Callable[..., Any]:
        """Imports and returns the cache spec function."""
        function: Callable[..., Any] = _load(self.kv_cache_specs)
        return function

    def check_ranks(self, config: Any, size: int, spreads_experts: bool) -> None:
        """Refuses a number of ranks that a parsed config cannot be shared out to.

        Raises:
            ConfigError: An axis does not divide; the message names it and its size.
        """
        _load(f"{self.shards}:check_ranks")(config, size, spreads_experts)

    def cut_config(self, config: Any, size: int) -> Any:
        """Returns a parsed config whose caches are those of one of ``size`` ranks."""
        return _load(f"{self.shards}:cut_config")(config, size)

    def make_shard_finder(self, config: Any, share: RankShare) -> ShardFinder:
        """Returns what tells which part of a published tensor a rank holds."""
        return partial(_load(f"{self.shards}:find_shard"), config, share)

    def load_block_sizes(self) -> tuple[int, ...]:
        """Imports and returns the block sizes."""
        sizes: tuple[int, ...] = _load(self.block_sizes)
        return sizes


_MODELS = "vllm.model_executor.models"
_DEEPSEEK_V4 = f"{_MODELS}.deepseek_v4"
_DEEPSEEK_V41 = f"{_MODELS}.deepseek_v41"


def _decoder(config: str) -> ModelEntry:
    """The entry of a family that differs from other decoders in its config only."""
    return ModelEntry(
        model=f"{_MODELS}.decoder.model:DecoderForCausalLM",
        config=f"{_MODELS}.{config}",
        kv_cache_specs=f"{_MODELS}.decoder.kv_cache:decoder_kv_cache_specs",
        block_sizes=f"{_MODELS}.decoder.kv_cache:SUPPORTED_BLOCK_SIZES",
        shards=f"{_MODELS}.decoder.shards",
        packs_weights=True,
    )


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "DeepseekV4ForCausalLM": ModelEntry(
            model=f"{_DEEPSEEK_V4}.model:DeepseekV4ForCausalLM",
            config=f"{_DEEPSEEK_V4}.config:DeepseekV4Config.from_dict",
            kv_cache_specs=f"{_DEEPSEEK_V4}.kv_cache:deepseek_v4_kv_cache_specs",
            block_sizes=f"{_DEEPSEEK_V4}.kv_cache:SUPPORTED_BLOCK_SIZES",
            shards=f"{_DEEPSEEK_V4}.shards",
        ),
        "DeepseekV41ForCausalLM": ModelEntry(
            model=f"{_DEEPSEEK_V41}.model:DeepseekV41ForCausalLM",
            config=f"{_DEEPSEEK_V41}.config:DeepseekV41Config.from_dict",
            kv_cache_specs=f"{_DEEPSEEK_V41}.kv_cache:deepseek_v41_kv_cache_specs",
            block_sizes=f"{_DEEPSEEK_V41}.kv_cache:SUPPORTED_BLOCK_SIZES",
            shards=f"{_DEEPSEEK_V4}.shards",
        ),
        "DeepseekV2ForCausalLM": _decoder("deepseek_v3:read_deepseek_v2"),
        "DeepseekV3ForCausalLM": _decoder("deepseek_v3:read_deepseek_v3"),
        "DeepseekV32ForCausalLM": _decoder("deepseek_v32:read_deepseek_v32"),
        "EmbeddingGemma2TextModel": _decoder("embedding_gemma2:read_embedding_gemma2"),
        "Gemma2ForCausalLM": _decoder("gemma2:read_gemma2"),
        "Gemma3ForCausalLM": _decoder("gemma3:read_gemma3"),
        "Gemma3ForConditionalGeneration": _decoder("gemma3:read_gemma3_with_vision"),
        "Gemma4ForCausalLM": _decoder("gemma4:read_gemma4"),
        "Gemma4ForConditionalGeneration": _decoder("gemma4:read_gemma4_with_towers"),
        "Gemma4UnifiedForCausalLM": _decoder("gemma4:read_gemma4"),
        "Gemma4UnifiedForConditionalGeneration": _decoder("gemma4:read_gemma4_with_towers"),
        "Glm4MoeForCausalLM": _decoder("glm4_moe:read_glm4_moe"),
        "Glm4MoeLiteForCausalLM": _decoder("deepseek_v3:read_deepseek_v3"),
        "Glm5NextForConditionalGeneration": _decoder("glm5_next:read_glm5_next"),
        "GlmMoeDsaForCausalLM": _decoder("deepseek_v32:read_glm_moe_dsa"),
        "GptOssForCausalLM": _decoder("gpt_oss:read_gpt_oss"),
        "KimiLinearForCausalLM": _decoder("kimi_linear:read_kimi_linear"),
        "Lfm2ForCausalLM": _decoder("lfm2:read_lfm2"),
        "Lfm2MoeForCausalLM": _decoder("lfm2:read_lfm2_moe"),
        "LlamaForCausalLM": _decoder("llama:read_llama"),
        "MinistralForCausalLM": _decoder("llama:read_mistral"),
        "MiniMaxM2ForCausalLM": _decoder("minimax_m2:read_minimax_m2"),
        "Ministral3ForCausalLM": _decoder("llama:read_ministral3"),
        "Mistral3ForConditionalGeneration": _decoder("llama:read_mistral3"),
        "MistralForCausalLM": _decoder("llama:read_mistral"),
        "Phi3ForCausalLM": _decoder("phi3:read_phi3"),
        "Qwen2ForCausalLM": _decoder("qwen3:read_qwen2"),
        "Qwen2MoeForCausalLM": _decoder("qwen3:read_qwen2_moe"),
        "Qwen3ForCausalLM": _decoder("qwen3:read_qwen3"),
        "Qwen3MoeForCausalLM": _decoder("qwen3:read_qwen3_moe"),
        "Qwen3NextForCausalLM": _decoder("qwen3_5:read_qwen3_next"),
        "Qwen3_5MoeForCausalLM": _decoder("qwen3_5:read_qwen3_5_moe"),
        "Qwen3_5MoeForConditionalGeneration": _decoder("qwen3_5:read_qwen3_5_moe_with_vision"),
        "Qwen3_5ForCausalLM": _decoder("qwen3_5:read_qwen3_5"),
        "Qwen3_5ForConditionalGeneration": _decoder("qwen3_5:read_qwen3_5_with_vision"),
    }
)


# What a config.json without names of architectures holds: the weights of a causal model.
_ARCHITECTURE_OF_TYPE: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_v4": "DeepseekV4ForCausalLM",
        "deepseek_v41": "DeepseekV41ForCausalLM",
        "deepseek_v41_text": "DeepseekV41ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "embedding_gemma2_text": "EmbeddingGemma2TextModel",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_text": "Gemma4ForCausalLM",
        "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "glm5_next": "Glm5NextForConditionalGeneration",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "llama": "LlamaForCausalLM",
        "minimax_m2": "MiniMaxM2ForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral3": "Mistral3ForConditionalGeneration",
        "ministral": "MinistralForCausalLM",
        "mistral": "MistralForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
)


def read_architectures(raw: Mapping[str, Any]) -> list[str]:
    """Returns the names that a config.json object gives its architecture.

    Where it gives none, ``model_type`` names it, if we serve that type.

    Raises:
        ConfigError: It is no list of names.
    """
    names = raw.get("architectures")
    if names is None or names == []:
        kind = raw.get("model_type")
        name = _ARCHITECTURE_OF_TYPE.get(kind) if isinstance(kind, str) else None
        return [] if name is None else [name]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"config.json: 'architectures' is {names!r}; allowed: a list of names such as "
            '["Qwen3ForCausalLM"]'
        )
    return names


def resolve_model(architectures: Sequence[str]) -> ModelEntry:
    """Returns the entry of the first architecture that we serve.

    Raises:
        UnsupportedModelError: None is; the message names them and what is supported.
    """
    for name in architectures:
        if name in MODELS:
            return MODELS[name]
    named = (
        ", ".join(architectures)
        or "none (config.json lacks 'architectures' and a known 'model_type')"
    )
    raise UnsupportedModelError(
        f"the checkpoint's architecture is not supported: {named}; supported: {', '.join(MODELS)}"
    )


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return attrgetter(name)(import_module(module))
