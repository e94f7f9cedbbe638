"""What a user says about an engine, and the one place where it becomes a resolved ``VllmConfig``.

Everything wrong is told here, before weights load and without torch.
"""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from vllm import envs
from vllm.config.additional import explain_additional_config
from vllm.config.cache import CacheConfig
from vllm.config.kv_connectors import KVConnectorRegistry
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import (
    MAX_WARM,
    MULTI_CONNECTOR,
    OFFLOADING_CONNECTOR,
    WRITE_POLICIES,
    KVTransferConfig,
    child_configs,
)
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.options import (
    POSITIVE,
    Limit,
    check_options,
    option,
    option_of,
    values_for,
    within,
)
from vllm.config.parallel import ParallelConfig
from vllm.config.retention import POLICIES, read_interval
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import NO_DRAFTS, SpeculativeConfig
from vllm.config.tenants import read_tenants
from vllm.config.vllm import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.exceptions import ConfigError
from vllm.logger import LOG_FORMATS, init_logger
from vllm.model_executor.model_loader.resolve import (
    ResolvedCheckpoint,
    list_aliases,
    override_config,
    read_generation_config,
    read_hf_config,
    resolve_checkpoint,
)
from vllm.model_executor.model_loader.vector_checkpoints import read_vector_checkpoint
from vllm.model_executor.models.registry import read_architectures, resolve_model
from vllm.platforms.resolve import (
    find_plugin_platform,
    get_current_platform,
    is_cuda_available,
)
from vllm.utils.argparse_utils import human_int_or_auto
from vllm.utils.byte_sizes import parse_size
from vllm.utils.gguf_file import is_gguf
from vllm.utils.ray_cluster import check_ray
from vllm.v1.engine.generation_defaults import check_ends, check_generation_config
from vllm.v1.engine.image_settings import check_settings
from vllm.v1.engine.images import ServedImages, check_budget, find_images
from vllm.v1.engine.option_flags import add_option_flags

logger = init_logger(__name__)

TOKENIZER_MODES = ("auto", "deepseek_v32", "deepseek_v4")
_DEFAULT_BLOCK_SIZE = 16
_DEFAULT_MAX_NUM_SEQS = 128
_OFFLOADING_BACKENDS = ("native",)
_MAX_HOST_GIB = 1 << 14


@dataclass
class EngineArgs:
    """Everything a user can say about an engine; None means "derive it".

    Attributes:
        model: A folder, a hub id, or "deepseek-v4" for the embedded checkpoint.
        trust_remote_code: Without effect: no code of a model is ever run.
    """

    model: str = "deepseek-v4"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    pipeline_parallel_size: int = 1
    use_tqdm_on_load: bool = True

    served_model_name: str | list[str] | None = option(
        None,
        "Names that clients may use; the first stands in responses. Default: the model.",
        group="model",
        many=True,
    )
    tokenizer: str | None = option(
        None, "Folder or hub id of the tokenizer, if not the model's.", group="model"
    )
    tokenizer_mode: str = option(
        "auto",
        group="model",
        choices=TOKENIZER_MODES,
        more="`deepseek_v32` and `deepseek_v4` insist on that model type.",
    )
    dtype: str = option_of(ModelConfig, "dtype")
    quantization: str | None = option_of(ModelConfig, "quantization")
    quantized_inputs: str = option_of(ModelConfig, "quantized_inputs")
    load_format: str = option_of(LoadConfig, "load_format")
    weights_cache_dir: str | None = option_of(LoadConfig, "weights_cache_dir")
    revision: str | None = option(
        None, "Branch, tag or commit of a hub id. Default: main.", group="model"
    )
    download_dir: str | None = option(
        None,
        "Where hub ids are kept. Default: the Hugging Face cache (HF_HOME).",
        group="model",
    )
    seed: int = option_of(ModelConfig, "seed")
    max_model_len: int | None = option(
        None,
        "Longest prompt + answer in tokens (1k, 2M); -1 or auto: what fits in memory. Default: the "
        "model's context.",
        group="model",
        parse=human_int_or_auto,
    )
    hf_overrides: dict[str, Any] = option(
        {},
        "Values over those of the checkpoint's config.json; objects in it are merged.",
        group="model",
        metavar="JSON",
    )
    override_generation_config: dict[str, Any] = option(
        {},
        "Sampling defaults over the checkpoint's: '{\"temperature\": 0.5}'.",
        group="model",
        metavar="JSON",
    )
    additional_config: dict[str, Any] = option(
        {},
        "Settings of a platform: known keys have no effect, and a warning says why of each.",
        group="model",
        metavar="JSON",
    )
    max_logprobs: int = option_of(ModelConfig, "max_logprobs")
    enforce_eager: bool = option_of(ModelConfig, "enforce_eager")

    block_size: int | None = option(
        None,
        "Tokens of a KV block: for DeepSeek-V4 32 (default), 64 or 128.",
        group="KV cache",
    )
    kv_cache_dtype: str = option_of(CacheConfig, "cache_dtype")
    gpu_memory_utilization: float = option_of(CacheConfig, "gpu_memory_utilization")
    kv_cache_memory_bytes: int | None = option_of(CacheConfig, "kv_cache_memory_bytes")
    num_gpu_blocks_override: int | None = option_of(CacheConfig, "num_gpu_blocks_override")
    enable_prefix_caching: bool | None = option(
        None, "Reuse the KV cache of equal prefixes. Default: on.", group="KV cache"
    )
    prefix_caching_hash_algo: str = option_of(CacheConfig, "prefix_caching_hash_algo")
    prefix_cache_retention_interval: str | int | None = option(
        None,
        "Which window state is kept for later requests: auto (default), 0 where prompts and "
        "answers end and part, N also every N tokens, none every common multiple of all blocks.",
        group="KV cache",
        metavar=f"{{{','.join(POLICIES)},0,N}}",
        more="Unset: as `VLLM_PREFIX_CACHE_RETENTION_INTERVAL` says.",
    )
    prefix_cache_pinned_share: float | None = option_of(CacheConfig, "prefix_cache_pinned_share")
    mamba_cache_mode: str = option(
        "align",
        "When recurrent states are kept: where hits can end (align), as the policy decides.",
        group="KV cache",
        limit=Limit(
            lambda mode: mode in ("none", "align"),
            "is not supported: states end at units of --block-size, and the policy keeps those "
            "that pay; --prefix-cache-retention-interval keeps them at fixed distances. Use align, "
            "or leave it out.",
        ),
        more="`none` is what `align` is: --no-enable-prefix-caching keeps nothing.",
    )
    mamba_cache_dtype: str = option(
        "auto",
        "Type of a short convolution's stored inputs: float32.",
        group="KV cache",
        limit=Limit(
            lambda dtype: dtype in ("auto", "float32"),
            "is not supported: convolution inputs share pages with states, which are float32. Use "
            "float32, or leave it out.",
        ),
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        "Type of recurrent states: float32.",
        group="KV cache",
        limit=Limit(
            lambda dtype: dtype in ("auto", "float32"),
            "is not supported: a state that is rounded drifts from the exact one, and answers "
            "would depend on where it was stored. Use float32, or leave it out.",
        ),
    )
    mamba_block_size: int | None = option(
        None,
        "Tokens between places where a recurrent state can end: only --block-size.",
        group="KV cache",
        limit=POSITIVE,
    )
    prefix_cache_dir: str | None = option(
        None,
        "Folder of your own in which cached prefixes outlive the server "
        "(docs/durable_cache.md). Default: none.",
        group="KV cache",
        metavar="DIR",
    )
    prefix_cache_disk_size: str | None = option(
        None,
        "What the files of --prefix-cache-dir may take, such as 8GiB. Default: a quarter of what "
        "is free, at most 16GiB.",
        group="KV cache",
        metavar="SIZE",
    )
    prefix_cache_warm: int | None = option(
        None,
        "Most used prefixes in --prefix-cache-dir to bring back at the start, before anybody asks "
        "for them; 0: none. Default: 8.",
        group="KV cache",
        limit=within(0, MAX_WARM),
        metavar="N",
    )
    prefix_cache_write_policy: str | None = option(
        None,
        "When --prefix-cache-dir gets what was computed: write_through (at once), "
        "write_through_selective (when a second request computes or hits it) or write_back (when "
        "memory gets short, and at the end). Default: write_through.",
        group="KV cache",
        choices=WRITE_POLICIES,
    )
    prefix_cache_write_budget: str | None = option(
        None,
        "Bytes that are written to --prefix-cache-dir in a day at most, such as 100GiB; with less "
        "than half of it left, as write_through_selective. Default: any number.",
        group="KV cache",
        metavar="SIZE",
    )
    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory that keep what the KV cache gives up (docs/durable_cache.md). "
        "Default: none.",
        group="KV cache",
        metavar="GIB",
    )
    kv_offloading_backend: str = option(
        "native",
        "What --kv-offloading-size goes by: native is the one there is.",
        group="KV cache",
        metavar="{native}",
    )
    kv_events_config: dict[str, Any] | None = option(
        None,
        "Publish what enters and leaves the prefix cache: "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.',
        group="KV cache",
        metavar="JSON",
        more="See `docs/kv_events.md`.",
    )
    kv_transfer_config: dict[str, Any] | None = option(
        None,
        "Prefill apart from decode (docs/disaggregation.md): "
        '{"kv_connector": "TcpConnector", "kv_role": "kv_producer", "kv_port": 14579}.',
        group="KV cache",
        metavar="JSON",
    )
    cache_trace: str | None = option_of(ObservabilityConfig, "cache_trace")
    cache_trace_max_bytes: int = option_of(ObservabilityConfig, "cache_trace_max_bytes")

    max_num_seqs: int | None = option(None, "Requests running at a time.", group="scheduling")
    max_num_batched_tokens: int | None = option(
        None, "Tokens of one step over all requests.", group="scheduling"
    )
    enable_chunked_prefill: bool | None = option(
        None, "Compute long prompts in several steps. Default: on.", group="scheduling"
    )
    scheduling_policy: str = option_of(SchedulerConfig, "policy")
    async_scheduling: bool | None = option_of(SchedulerConfig, "async_scheduling")
    max_num_queued_reqs: int | None = option_of(SchedulerConfig, "max_num_queued_reqs")
    max_num_queued_tokens: int | None = option_of(SchedulerConfig, "max_num_queued_tokens")
    tenants: str | None = option(
        None,
        "YAML or JSON file of those who share the server: keys, weights, limits, shares of the "
        "cache (docs/tenants.md). Default: all requests are alike.",
        group="scheduling",
        metavar="FILE",
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        'Draft tokens: {"method": "mtp", "num_speculative_tokens": 1 to 4}, or "ngram" with '
        "prompt_lookup_max and prompt_lookup_min, which drafts as much as pays where no number is "
        "given. Default: that, for one or two requests at a time, where native kernels run; "
        '{"method": "none"}: no drafts.',
        group="scheduling",
        also=("-sc",),
        metavar="JSON",
        more="See `docs/spec_decode.md`.",
    )

    tensor_parallel_size: int = option_of(ParallelConfig, "tensor_parallel_size")
    enable_expert_parallel: bool = option_of(ParallelConfig, "enable_expert_parallel")
    distributed_executor_backend: str | None = option_of(
        ParallelConfig, "distributed_executor_backend"
    )

    data_parallel_size: int = option_of(ParallelConfig, "data_parallel_size")
    data_parallel_size_local: int | None = option_of(ParallelConfig, "data_parallel_size_local")
    data_parallel_backend: str = option_of(ParallelConfig, "data_parallel_backend")
    data_parallel_address: str = option_of(ParallelConfig, "data_parallel_address")
    data_parallel_routing: Literal["prefix", "round-robin"] = option_of(
        ParallelConfig, "data_parallel_routing"
    )
    data_parallel_fault_tolerance: bool = option_of(ParallelConfig, "data_parallel_fault_tolerance")
    data_parallel_restarts: int = option_of(ParallelConfig, "data_parallel_restarts")
    warm_pull_bytes: int = option_of(ParallelConfig, "warm_pull_bytes")
    warm_pull_seconds: float = option_of(ParallelConfig, "warm_pull_seconds")

    disable_log_stats: bool = option(
        False, "Do not log throughput and cache use.", group="observability"
    )
    kv_cache_metrics: bool = option_of(ObservabilityConfig, "kv_cache_metrics")
    kv_cache_metrics_sample: float = option_of(ObservabilityConfig, "kv_cache_metrics_sample")
    otlp_traces_endpoint: str | None = option_of(ObservabilityConfig, "otlp_traces_endpoint")
    show_hidden_metrics_for_version: str | None = option(
        None,
        "Show metrics under their names of earlier versions too, whatever the version.",
        group="observability",
        metavar="VERSION",
        more="See `docs/metrics.md`.",
    )
    log_format: str = option(
        "text", "json: one object a line.", group="observability", choices=LOG_FORMATS
    )
    logging_config: str | None = option_of(ObservabilityConfig, "logging_config")

    limit_mm_per_prompt: Mapping[str, Any] = option_of(MultiModalConfig, "limit_mm_per_prompt")
    mm_processor_kwargs: Mapping[str, Any] = option_of(MultiModalConfig, "mm_processor_kwargs")
    media_io_kwargs: Mapping[str, Any] = option_of(MultiModalConfig, "media_io_kwargs")
    allowed_media_domains: tuple[str, ...] = option_of(MultiModalConfig, "allowed_media_domains")
    allowed_local_media_path: str | None = option_of(MultiModalConfig, "allowed_local_media_path")
    language_model_only: bool = option_of(MultiModalConfig, "language_model_only")
    mmproj: str | None = option_of(MultiModalConfig, "mmproj")
    mm_encoder_cache_dir: str | None = option_of(MultiModalConfig, "mm_encoder_cache_dir")
    mm_encoder_cache_disk_size: str = option_of(MultiModalConfig, "mm_encoder_cache_disk_size")
    mm_processor_cache_gb: float = option_of(MultiModalConfig, "mm_processor_cache_gb")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the engine's flags."""
        add_option_flags(parser, EngineArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Take the engine's flags out of parsed arguments."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def create_vllm_config(self) -> VllmConfig:
        """Resolve the checkpoint and every derived default.

        Raises:
            ConfigError: A value, the checkpoint or its config.json is wrong.
            UnsupportedModelError: Its architecture is not served.
        """
        self._check_values()
        load_config = LoadConfig(use_tqdm=self.use_tqdm_on_load, **values_for(LoadConfig, self))
        checkpoint = resolve_checkpoint(
            self.model,
            with_weights=self.load_format != "dummy",
            revision=self.revision,
            download_dir=self.download_dir,
        )
        model_config = self._make_model_config(checkpoint)
        scheduler_config = self._make_scheduler_config(model_config)
        multimodal_config = self._make_multimodal_config()
        check_settings(model_config, multimodal_config)
        check_budget(
            model_config.max_picture_tokens,
            model_config.pictures_are_whole,
            scheduler_config.max_num_batched_tokens,
            scheduler_config.max_num_seqs,
        )
        config = VllmConfig(
            model_config=model_config,
            cache_config=self._make_cache_config(model_config),
            parallel_config=self._make_parallel_config(model_config),
            scheduler_config=scheduler_config,
            load_config=load_config,
            speculative_config=self._make_speculative_config(model_config),
            may_draft=self._may_draft(model_config),
            kv_events_config=self._make_kv_events_config(),
            kv_transfer_config=self._make_kv_transfer_config(),
            observability_config=self._make_observability_config(),
            multimodal_config=multimodal_config,
        )
        # The engine core looks again, but only seconds later. Finding the platform may load torch:
        # that is borne only where a platform has something to refuse.
        keeps_copies = load_config.weights_cache_dir is not None
        if keeps_copies or is_gguf(model_config.path or model_config.model):
            get_current_platform().check_before_load(config)
        KVConnectorFactory.check_before_load(config)
        return config

    def __post_init__(self) -> None:
        # Programs have paths where the command line has texts.
        for name in (
            "model",
            "tokenizer",
            "download_dir",
            "weights_cache_dir",
            "mmproj",
            "mm_encoder_cache_dir",
        ):
            if isinstance(path := getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(path))

    def _check_values(self) -> None:
        """Refuse what is wrong by itself, before a checkpoint is looked for."""
        check_options(self)
        if self.pipeline_parallel_size != 1:
            raise ConfigError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} is not supported yet: use 1."
            )
        for line in explain_additional_config(self.additional_config):
            logger.warning(line)
        if self.trust_remote_code:
            logger.warning("trust_remote_code has no effect: no code of a model is ever run.")

    def _make_model_config(self, checkpoint: ResolvedCheckpoint) -> ModelConfig:
        own = read_hf_config(checkpoint.path, self._find_drafts_file(), self.mmproj)
        overridden = override_config(own, self.hf_overrides)
        hf_config, generates = read_vector_checkpoint(overridden, checkpoint.path)
        # Parsed for its errors too; the engine core parses it again where it is used.
        architectures = read_architectures(hf_config)
        parsed = resolve_model(architectures).parse_config(hf_config)
        # Some files leave these to defaults, or nest them in a text part.
        hf_config["architectures"] = architectures
        sees_both_ways = hf_config.get("use_bidirectional_attention") is True
        hf_config["vocab_size"] = parsed.vocab_size
        hf_config["max_position_embeddings"] = parsed.max_position_embeddings
        text_part = hf_config.get("text_config")
        if hf_config.get("eos_token_id") is None and isinstance(text_part, dict):
            hf_config["eos_token_id"] = text_part.get("eos_token_id")
        check_ends(hf_config.get("eos_token_id"), "config.json")
        generation_config = {
            **read_generation_config(checkpoint.path),
            **self.override_generation_config,
        }
        check_generation_config(generation_config)
        if self.tokenizer_mode != "auto" and hf_config.get("model_type") != self.tokenizer_mode:
            raise ConfigError(
                f"tokenizer_mode={self.tokenizer_mode!r} does not fit a model of type "
                f"{hf_config.get('model_type')!r}: use auto."
            )
        names = self.served_model_name or [self.model]
        aliases = () if self.served_model_name else list_aliases(checkpoint)
        tokenizer = self.tokenizer
        if tokenizer is not None:
            tokenizer = resolve_checkpoint(
                tokenizer, with_weights=False, download_dir=self.download_dir
            ).path
        images = self._find_images(parsed, checkpoint)
        return ModelConfig(
            self.model,
            tokenizer=tokenizer,
            max_model_len=self.max_model_len,  # type: ignore[arg-type]  # None: derived
            skip_tokenizer_init=self.skip_tokenizer_init,
            path=checkpoint.path,
            is_embedded=checkpoint.is_embedded,
            served_model_names=(names,) if isinstance(names, str) else tuple(names),
            aliases=aliases,
            hf_config=hf_config,
            generation_config=generation_config,
            generates=generates and not sees_both_ways,
            placeholder_ids=parsed.placeholder_ids,
            image_family=images.family,
            no_images_reason=images.reason,
            tower_fingerprint=images.fingerprint,
            pictures_are_whole=images.are_whole,
            max_picture_tokens=images.longest,
            picture_row_bytes=images.row_bytes,
            **values_for(ModelConfig, self),
        )

    def _find_images(self, parsed: Any, checkpoint: ResolvedCheckpoint) -> ServedImages:
        settings = self._make_multimodal_config()
        plan, obstacle = getattr(parsed, "images", None), ""
        if settings.language_model_only:
            obstacle = "the server was started with --language-model-only"
        elif not settings.max_images:
            obstacle = "the server was started with --limit-mm-per-prompt image=0"
        # Looking for CUDA may load torch, and only a model with a tower depends on it.
        elif plan is not None and (find_plugin_platform() is not None or is_cuda_available()):
            obstacle = "pictures are read on a CPU only"
        return find_images(
            plan,
            checkpoint.path,
            obstacle=obstacle,
            mmproj=settings.mmproj,
            is_drawn=self.load_format == "dummy",
            seed=self.seed,
        )

    def _make_multimodal_config(self) -> MultiModalConfig:
        # Refused now, and not when the worker opens the folder.
        parse_size("--mm-encoder-cache-disk-size", str(self.mm_encoder_cache_disk_size))
        return MultiModalConfig(**values_for(MultiModalConfig, self))

    def _make_parallel_config(self, model_config: ModelConfig) -> ParallelConfig:
        config = ParallelConfig(**values_for(ParallelConfig, self))
        _check_backends(config)
        size = self.tensor_parallel_size
        entry = resolve_model(model_config.architectures)
        entry.check_ranks(_parse_model(model_config), size, self.enable_expert_parallel)
        return config

    def _make_cache_config(self, model_config: ModelConfig) -> CacheConfig:
        block_size = _resolve_block_size(self.block_size, model_config)
        if self.mamba_block_size not in (None, block_size):
            raise ConfigError(
                f"mamba_block_size={self.mamba_block_size} is not supported: a recurrent state can "
                f"end wherever a hit can, at every {block_size} tokens (--block-size). Leave it "
                "out."
            )
        retention = envs.retention_or_default(self.prefix_cache_retention_interval)
        _check_retention(retention, block_size, model_config)
        if self.prefix_cache_pinned_share is not None and not envs.VLLM_PIN_SWA_TOKENS:
            raise ConfigError(
                f"prefix_cache_pinned_share={self.prefix_cache_pinned_share} says how much may be "
                "pinned, but nothing is: set VLLM_PIN_SWA_TOKENS=1, or leave it out."
            )
        return CacheConfig(
            block_size=block_size,
            prefix_cache_retention_interval=retention,
            enable_prefix_caching=self._caches_prefixes(model_config),
            **values_for(CacheConfig, self),
        )

    def _make_scheduler_config(self, model_config: ModelConfig) -> SchedulerConfig:
        chunked = self.enable_chunked_prefill is not False and not model_config.sees_both_ways
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is None:
            tokens = max(SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs or 0)
            if not chunked:
                tokens = max(tokens, model_config.max_model_len)
        if seqs is None:
            seqs = max(1, min(_DEFAULT_MAX_NUM_SEQS, tokens))
        return SchedulerConfig(
            max_model_len=model_config.max_model_len,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            enable_chunked_prefill=chunked,
            tenants=None if self.tenants is None else read_tenants(self.tenants),
            **{
                **values_for(SchedulerConfig, self),
                "async_scheduling": self._can_schedule_ahead() if self.async_scheduling else None,
            },
        )

    def _caches_prefixes(self, model_config: ModelConfig) -> bool:
        """Whether prefixes are cached, which needs tokens that do not see those behind them.

        Raises:
            ConfigError: It is asked for, or chunks are, and cannot be.
        """
        if not model_config.sees_both_ways:
            return self.enable_prefix_caching is not False
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name}=true does not go with {model_config.model}: its tokens see those "
                    "behind them, so that every prompt is computed whole. Leave it out."
                )
        if self._asks_for_drafts:
            raise ConfigError(
                f"{model_config.model} generates no text, so there is nothing to draft: leave "
                "speculative_config out."
            )
        return False

    def _can_schedule_ahead(self) -> bool:
        """Whether nothing is asked for that needs a step's tokens before the next is scheduled."""
        if not self._asks_for_drafts:
            return True
        logger.warning(
            "--async-scheduling is off: drafts are made of a step's tokens, so that every step "
            "would wait for the last one (--speculative-config); answers are the same without"
        )
        return False

    def _find_drafts_file(self) -> str | None:
        """Return the file of a block that drafts, if it has one of its own."""
        config = self._read_speculative_config()
        return None if config is None else config.drafts_file

    @property
    def _asks_for_drafts(self) -> bool:
        return self.speculative_config not in (None, NO_DRAFTS)

    def _may_draft(self, model_config: ModelConfig) -> bool:
        """Whether drafts may be made that nobody asked for."""
        is_open = self.speculative_config is None and not self.async_scheduling
        return is_open and model_config.generates

    def _read_speculative_config(self) -> SpeculativeConfig | None:
        asked = self.speculative_config
        if asked is None or not self._asks_for_drafts:
            return None
        return SpeculativeConfig.from_dict(asked)

    def _make_speculative_config(self, model_config: ModelConfig) -> SpeculativeConfig | None:
        config = self._read_speculative_config()
        if config is not None and config.method == "mtp":
            _check_mtp(model_config)
        return config

    def _make_kv_transfer_config(self) -> KVTransferConfig | None:
        asked = self.kv_transfer_config
        tiers = self._make_tiers()
        if tiers is not None:
            asked = tiers if asked is None else _join_connectors(tiers, asked)
        if self.warm_pull_bytes and self.cache_trace is not None:
            raise ConfigError(
                f"--cache-trace does not record what warm_pull_bytes={self.warm_pull_bytes} pulls: "
                "leave one of them out."
            )
        if asked is None:
            return None
        config = KVTransferConfig.from_dict(asked)
        if self.warm_pull_bytes:
            for part in child_configs(config) or [config]:
                if not KVConnectorRegistry.moves_checkpoints(part):
                    raise ConfigError(
                        f"warm_pull_bytes={self.warm_pull_bytes} pulls prefixes with the places "
                        f"where they are resumed, which {part.kv_connector} of "
                        "--kv-transfer-config does not move: leave one of them out."
                    )
        KVConnectorRegistry.load_class(config)
        if self.cache_trace is not None and config.kv_connector != OFFLOADING_CONNECTOR:
            raise ConfigError(
                "--cache-trace does not record what --kv-transfer-config loads from other engines: "
                "leave one of them out."
            )
        return config

    def _make_tiers(self) -> dict[str, Any] | None:
        """Return the connector that the plain flags of tiers ask for."""
        given = {
            "prefix_cache_disk_size": self.prefix_cache_disk_size,
            "prefix_cache_warm": self.prefix_cache_warm,
            "prefix_cache_write_policy": self.prefix_cache_write_policy,
            "prefix_cache_write_budget": self.prefix_cache_write_budget,
        }
        for name, value in given.items():
            if value is not None and self.prefix_cache_dir is None:
                raise ConfigError(
                    f"{name}={value!r} is about a folder, but there is none: set "
                    "--prefix-cache-dir."
                )
        if self.kv_offloading_backend not in _OFFLOADING_BACKENDS:
            raise ConfigError(
                f"kv_offloading_backend={self.kv_offloading_backend!r}: use "
                f"{' or '.join(_OFFLOADING_BACKENDS)}."
            )
        extra: dict[str, Any] = {}
        if self.kv_offloading_size is not None:
            if not 0 < self.kv_offloading_size <= _MAX_HOST_GIB:
                raise ConfigError(
                    f"kv_offloading_size={self.kv_offloading_size!r} must be GiB of host memory "
                    f"above 0, at most {_MAX_HOST_GIB}."
                )
            extra["cpu_bytes_to_use"] = int(self.kv_offloading_size * 2**30)
        if self.prefix_cache_dir is not None:
            tier = {"type": "fs", "root_dir": self.prefix_cache_dir}
            if self.prefix_cache_disk_size is not None:
                size = str(self.prefix_cache_disk_size)
                tier["max_size"] = str(parse_size("--prefix-cache-disk-size", size))
            if self.prefix_cache_write_policy is not None:
                tier["write_policy"] = self.prefix_cache_write_policy
            if self.prefix_cache_write_budget is not None:
                size = str(self.prefix_cache_write_budget)
                tier["write_budget_per_day"] = str(parse_size("--prefix-cache-write-budget", size))
            extra["secondary_tiers"] = [tier]
            if self.prefix_cache_warm is not None:
                extra["warm"] = self.prefix_cache_warm
        if not extra:
            return None
        return {
            "kv_connector": OFFLOADING_CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }

    def _make_kv_events_config(self) -> KVEventsConfig | None:
        if self.kv_events_config is None:
            return None
        config = KVEventsConfig.from_dict(self.kv_events_config)
        if not config.publishes:
            logger.warning(
                "KV events are configured but not published: set enable_kv_cache_events to true."
            )
        elif self.enable_prefix_caching is False:
            logger.warning("KV events are on, but prefix caching is off: there will be none.")
        return config

    def _make_observability_config(self) -> ObservabilityConfig:
        if self.otlp_traces_endpoint is not None and find_spec("opentelemetry") is None:
            raise ConfigError(
                "otlp_traces_endpoint needs OpenTelemetry: install the otel extra "
                "(pip install 'vllm[otel]' from where this package came)."
            )
        return ObservabilityConfig(
            log_stats=not self.disable_log_stats,
            show_hidden_metrics=self.show_hidden_metrics_for_version is not None,
            log_format=self.log_format,
            **values_for(ObservabilityConfig, self),
        )

    def describe_derived(self, config: VllmConfig) -> dict[str, Any]:
        """Return what was left open here, as ``create_vllm_config`` resolved it."""
        resolved = {
            "max_model_len": config.model_config.max_model_len,
            "block_size": config.cache_config.block_size,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }
        return {name: value for name, value in resolved.items() if getattr(self, name) is None}


# One class serves both: nothing about the flags differs for an asynchronous engine.
AsyncEngineArgs = EngineArgs


def _resolve_block_size(block_size: int | None, model_config: ModelConfig) -> int:
    if not model_config.hits_at_units:
        return _DEFAULT_BLOCK_SIZE if block_size is None else block_size
    allowed = resolve_model(model_config.architectures).load_block_sizes()
    if block_size is None:
        platform = find_plugin_platform()
        own = platform.default_block_size(model_config.hf_config) if platform else None
        return own or allowed[0]
    if block_size not in allowed:
        raise ConfigError(
            f"block_size={block_size} is not supported for DeepSeek-V4: use one of "
            f"{', '.join(map(str, allowed))}."
        )
    return block_size


def _parse_model(model_config: ModelConfig) -> Any:
    """Return config.json as the model's own module reads it, in either spelling."""
    return resolve_model(model_config.architectures).parse_config(model_config.hf_config)


def _check_backends(config: ParallelConfig) -> None:
    """Refuse a backend whose package is not installed."""
    if config.data_parallel_size > 1 and config.data_parallel_backend == "ray":
        check_ray("data_parallel_backend")
    if config.distributed_executor_backend == "ray":
        check_ray("distributed_executor_backend")


def _join_connectors(tiers: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return one connector of the tiers and of what else was asked for; tiers are nearer."""
    name = asked.get("kv_connector")
    if name in (OFFLOADING_CONNECTOR, MULTI_CONNECTOR):
        raise ConfigError(
            f"--prefix-cache-dir and --kv-offloading-size stand for an {OFFLOADING_CONNECTOR}, and "
            f"--kv-transfer-config names {name} itself: put the folder there, or leave one out."
        )
    extra = {"connectors": [tiers, asked]}
    shared: dict[str, Any] = {
        key: asked[key] for key in ("engine_id", "kv_load_failure_policy") if key in asked
    }
    role = {"kv_role": asked["kv_role"]} if "kv_role" in asked else {}
    joined: dict[str, Any] = {"kv_connector": MULTI_CONNECTOR, "kv_connector_extra_config": extra}
    return {**joined, **role, **shared}


def _check_mtp(model_config: ModelConfig) -> None:
    """Refuse method "mtp" where config.json promises no MTP block, before weights load."""
    parsed = _parse_model(model_config)
    if parsed.has_dspark_drafter:
        raise ConfigError(
            "speculative-config method 'mtp' does not fit this checkpoint: its mtp.* tensors are "
            "a DSpark drafter, which is not supported; use method 'ngram'."
        )
    if not parsed.num_nextn_predict_layers:
        raise ConfigError(
            "speculative-config method 'mtp' needs an MTP block, and of this checkpoint none is "
            f"served (num_nextn_predict_layers={parsed.num_nextn_predict_layers}); use method "
            "'ngram'."
        )


def _check_retention(
    retention: str | int | None, block_size: int, model_config: ModelConfig
) -> None:
    """Refuse a retention interval that the model's cache cannot follow, before weights load."""
    text = "auto" if retention is None else str(retention).strip().lower()
    if text == "0" or text in POLICIES:
        return
    step = _parse_model(model_config).find_retention_step(block_size)
    if step is None:
        raise ConfigError(
            f"prefix_cache_retention_interval={retention!r} needs a model with sliding-window "
            "or recurrent layers: use auto, none or 0, or leave it out."
        )
    read_interval(retention, step)
