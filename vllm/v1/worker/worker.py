"""One device: loads the model, owns the KV cache, runs steps. The same for every platform."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ALONE, SingleProcessGroup, WorkerPlace
from vllm.distributed.process_group import TorchProcessGroup
from vllm.exceptions import CheckpointError, ConfigError, EngineError
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import WeightQuantization
from vllm.model_executor.model_loader.gguf_weights import GgufWeights
from vllm.model_executor.model_loader.int8_weights import ROUNDING_NAMES, Int8Weights
from vllm.model_executor.model_loader.loader import load_model_weights, read_stored_tensors
from vllm.model_executor.model_loader.packed_weights import PackedWeights
from vllm.model_executor.model_loader.quantization_config import (
    METHOD_NAMES,
    check_named_method,
    read_quantization,
)
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import RankShare
from vllm.model_executor.model_loader.stored_weights import StoredWeights
from vllm.model_executor.model_loader.tied_heads import has_own_head
from vllm.model_executor.models.registry import ModelEntry, resolve_model
from vllm.model_executor.towers.kernels import TorchKernels
from vllm.model_executor.towers.mmproj_values import read_mmproj_tensors
from vllm.model_executor.towers.plans import TowerPlan
from vllm.model_executor.towers.tower import Tower
from vllm.platforms.interface import Platform
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.byte_sizes import parse_size
from vllm.utils.gguf_file import is_gguf
from vllm.utils.large_blocks import trim_heap
from vllm.utils.liveness import LONG_STEP_TIMEOUTS
from vllm.v1.attention.metadata import CacheLayout
from vllm.v1.attention.ops.narrow_linear import is_native
from vllm.v1.attention.ops.registry import OpResolver
from vllm.v1.attention.ops.stored import ROUNDED_INPUTS
from vllm.v1.attention.step_model import StepModel
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.kv_offload.identity import describe_numerics
from vllm.v1.kv_offload.store.folder import WEIGHTS_FILE
from vllm.v1.kv_offload.store.weights_digest import digest_files
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, PendingStep
from vllm.v1.spec_decode.factory import make_proposer
from vllm.v1.worker.connector_steps import make_connector_steps
from vllm.v1.worker.dtypes import resolve_cache_dtype, resolve_dtype
from vllm.v1.worker.key_sizes import NUM_TOKENS, digest_sizes, measure_key_sizes
from vllm.v1.worker.kv_cache_tensors import allocate_kv_cache
from vllm.v1.worker.model_runner import ModelRunner, RunnerLimits
from vllm.v1.worker.one_request import OneRequest
from vllm.v1.worker.picture_store import PictureStore, make_folder
from vllm.v1.worker.pictures import PictureRows
from vllm.v1.worker.weights_cache import WeightsCache

logger = init_logger(__name__)

# Patches of a picture, about.
_TOWER_ROWS = 2_000


class Worker:
    """One device's part in serving a model.

    Its life: ``init_device``, ``load_model``, its specs and memory asked for,
    ``initialize_from_config``, then ``execute_model`` once a step.

    Args:
        vllm_config: The configuration, the platform's defaults filled in.
        platform: The device's kind.
        place: Where it stands among the workers that share the model.

    Owns: the model, and through its runner everything on the device.
    """

    def __init__(
        self, vllm_config: VllmConfig, platform: Platform, place: WorkerPlace = ALONE
    ) -> None:
        self._config = vllm_config
        self._platform = platform
        self._place = place
        spreads_experts = vllm_config.parallel_config.enable_expert_parallel
        self._share = RankShare(place.rank, place.size, spreads_experts and place.size > 1)
        self._group: TorchProcessGroup | SingleProcessGroup = SingleProcessGroup()
        self._device: torch.device | None = None
        self._entry: ModelEntry = resolve_model(vllm_config.model_config.architectures)
        spec = self._entry.parse_config(vllm_config.model_config.hf_config)
        speculative = vllm_config.speculative_config
        is_run = speculative is not None and speculative.method == "mtp"
        self._model_spec: Any = spec.for_drafts(is_run)
        self._drafts_file = None if speculative is None else speculative.drafts_file
        self._find_shard = self._entry.make_shard_finder(self._model_spec, self._share)
        self._dtype = resolve_dtype(vllm_config.model_config.dtype)
        self._model: Any = None
        self._tower: Tower | None = None
        self._num_previous_tokens = 0
        self._stored: list[StoredTensor] = []
        self._quantization: WeightQuantization | None = None
        self._gguf: GgufWeights | None = None
        self._runner: ModelRunner | None = None
        # A digest, once they are measured.
        self._key_sizes = ""

    def init_device(self) -> None:
        """Select the device and the number of host threads; meet the other workers.

        Raises:
            EngineError: The others did not come.
        """
        self._platform.bind_host_threads(self._place.local_rank)
        num_threads = self._platform.default_num_threads()
        if num_threads is not None:
            torch.set_num_threads(max(1, num_threads // self._place.local_size))
        self._device = self._platform.make_device(self._place.local_rank)
        if self._place.size > 1:
            self._group = self._join_group()
        logger.info(
            "worker %d: device %s, %s, %d host threads",
            self._place.rank,
            self._device,
            self._dtype,
            torch.get_num_threads(),
        )

    def _join_group(self) -> TorchProcessGroup:
        place, backend = self._place, self._platform.dist_backend
        # A step may take this long before it counts as hung: no collective waits longer.
        timeout_s = LONG_STEP_TIMEOUTS * envs.VLLM_ENGINE_HEARTBEAT_TIMEOUT
        try:
            return TorchProcessGroup(place.rank, place.size, backend, place.rendezvous, timeout_s)
        except RuntimeError as error:
            raise EngineError(
                f"worker {place.rank} of {place.size} did not meet the others over {backend}: "
                f"{error}"
            ) from error

    def build_model(self) -> int:
        """Build the model, its weights not filled yet; on a CPU they take no memory until then.

        Returns:
            The bytes of its weights.

        Raises:
            CheckpointError: The files' headers do not fit the model.
            ConfigError: The device's memory is too small for the weights.
        """
        self._stored = self._read_headers()
        self._tower = self._make_tower()
        if self._model_spec.ties_head and has_own_head(self._stored):
            logger.warning(
                "config.json ties the output matrix to the embedding, but the checkpoint's has "
                "values of its own: it is served with both"
            )
            self._model_spec = self._model_spec.with_own_head()
        self._quantization = self._find_quantization(self._stored)
        chosen = {} if self._quantization is None else {"quantization": self._quantization}
        try:
            self._model = self._entry.load_model_class()(
                self._model_spec,
                ops=self._make_op_resolver(),
                dtype=self._dtype,
                device=self._device,
                group=self._group,
                spreads_experts=self._share.spreads_experts,
                **chosen,
            )
        except (RuntimeError, MemoryError) as error:
            # Of too little memory an accelerator raises a class of its own, which its worker
            # explains; a CPU only says so.
            is_shortage = isinstance(error, MemoryError) or "memory" in str(error)
            if isinstance(error, torch.OutOfMemoryError) or not is_shortage:
                raise
            raise ConfigError(
                f"The weights of {self._config.model_config.model} do not fit in the memory of "
                f"{self._device}: {str(error) or 'it gives no more'}. Serve a smaller or quantised "
                "checkpoint."
            ) from error
        self._model.eval()
        # What is on no device stays in its file; random weights have none.
        is_drawn = self._config.load_config.load_format == "dummy"
        slots = self._model.weight_slots().values()
        return sum(slot.nbytes for slot in slots if is_drawn or not slot.is_meta)

    def load_model(self) -> None:
        """Fill the model's weights, and build it first if that was not done.

        Raises:
            CheckpointError: The files do not fit the model.
        """
        if self._model is None:
            self.build_model()
        model_config, load_config = self._config.model_config, self._config.load_config
        filled = self._take_copies()
        report = load_model_weights(
            self._model,
            model_config.path or model_config.model,
            load_config.load_format,
            model_config.seed,
            use_tqdm=load_config.use_tqdm
            and self._place.rank == 0
            and logger.isEnabledFor(logging.INFO),
            stored=self._stored,
            find_shard=self._find_shard,
            filled=filled,
        )
        self._stored = []
        if self._quantization is not None:
            self._quantization.finish_loading()
            trim_heap()
        self._gguf = None
        # Platforms may wrap the model: its own word is kept.
        self._num_previous_tokens = self._model.num_previous_tokens
        if self._num_previous_tokens:
            folder = model_config.tokenizer or model_config.path or model_config.model
            is_drawn = load_config.load_format == "dummy"
            self._model.bind_tokenizer(None if is_drawn else Tokenizer.from_folder(folder))
        if self._config.cache_config.cache_dtype == "int8":
            self._size_keys()
        speculative = self._config.speculative_config
        if speculative is not None and speculative.method == "mtp" and not report.mtp_present:
            raise CheckpointError(
                f"method 'mtp' needs the MTP block, but {model_config.path or model_config.model} "
                "has no mtp.* tensors; use method 'ngram' or a checkpoint that has them."
            )

    def _size_keys(self) -> None:
        """Measure what keys are divided by before they are rounded, and tell the model."""
        assert self._device is not None, "init_device comes first"
        make_request = partial(
            OneRequest,
            self._model,
            self._find_specs(torch.float32),
            self._platform,
            self._device,
            self._platform.make_step_model,
            num_tokens=NUM_TOKENS,
            stored=frozenset({"keys", "dense"}),
        )
        sizes = measure_key_sizes(self._model, make_request)
        self._model.put_key_sizes(sizes)
        self._key_sizes = digest_sizes(sizes, self._group)

    def _take_copies(self) -> Sequence[torch.Tensor]:
        """Take weights that an earlier start packed; return what files need not fill."""
        folder, weights = self._config.load_config.weights_cache_dir, self._gguf
        if folder is None or weights is None:
            return ()
        model_config = self._config.model_config
        cache = WeightsCache(folder)
        drafts = "" if self._drafts_file is None else cache.digest(self._drafts_file)
        copies = cache.open(
            model_config.path or model_config.model,
            weights.fingerprint_packing(),
            torch.get_num_threads(),
        )
        return weights.take_copies(
            copies, lambda name: f"{name} of {drafts}" if weights.is_of_drafts(name) else name
        )

    def _make_tower(self) -> Tower | None:
        """Return what reads pictures, its tensors taken out of the model's; None: nothing does."""
        images = getattr(self._model_spec, "images", None)
        if images is None:
            return None
        plan: TowerPlan = images.tower
        is_drawn = self._config.load_config.load_format == "dummy"
        own = [] if is_drawn else self._take_tower_tensors(plan)
        if self._config.model_config.image_family is None:
            if own:
                reason = self._config.model_config.no_images_reason
                logger.info("pictures: the tower's %d tensors are left out: %s", len(own), reason)
            return None
        mmproj = self._config.multimodal_config.mmproj
        if mmproj is not None and not is_drawn:
            own = read_mmproj_tensors(mmproj)
        seed = self._config.model_config.seed
        # Thousands of rows at a time: where narrow products are slow, all is widened once.
        dtype = self._dtype if is_native(self._dtype, _TOWER_ROWS) else torch.float32
        kernels = self._platform.find_tower_kernels() if dtype == torch.float32 else None
        tower = Tower(plan, None if is_drawn else own, dtype, seed, kernels or TorchKernels)
        logger.info(
            "pictures: the tower (%.1f MB) stays in its files until the first one",
            tower.num_bytes / 1e6,
        )
        return tower

    def _take_tower_tensors(self, plan: TowerPlan) -> list[StoredTensor]:
        """Take the tower's tensors out of the model's."""
        names = {
            tensor.name
            for tensor in self._stored
            if plan.own_name(tensor.name).startswith(plan.prefixes)
        }
        own = [tensor for tensor in self._stored if tensor.name in names]
        self._stored = [tensor for tensor in self._stored if tensor.name not in names]
        return own

    def _make_pictures(self, steps: StepModel) -> PictureRows | None:
        if self._tower is None:
            return None
        if not steps.takes_pictures:
            raise ConfigError(
                f"what runs {self._config.model_config.model} here takes no pictures: start with "
                "--language-model-only."
            )
        has_axes = any(
            layer.rope is not None and layer.rope.sections for layer in self._model_spec.layers
        )
        return PictureRows(
            self._model_spec.images,
            self._tower,
            has_axes=has_axes,
            store=self._open_store(self._tower),
        )

    def _open_store(self, tower: Tower) -> PictureStore | None:
        """Return the disk that keeps rows of pictures; None: none was asked for."""
        settings = self._config.multimodal_config
        if settings.mm_encoder_cache_dir is None:
            return None
        folder = make_folder(settings.mm_encoder_cache_dir)
        made_of: str | None = f"seed {self._config.model_config.seed}"
        if tower.files:
            # Rows outlive what the first bytes of tensors tell apart.
            logger.info("pictures: the tower's %d file(s) are read for a digest", len(tower.files))
            made_of = digest_files(tower.files, folder / WEIGHTS_FILE)
        maker = (
            f"{describe_numerics(self._config)}, {torch.get_num_threads()} threads, "
            f"{self._model_spec.images.tower}, {tower.numerics}, {made_of}"
        )
        size = parse_size("--mm-encoder-cache-disk-size", settings.mm_encoder_cache_disk_size)
        return PictureStore(folder, size, maker)

    def _make_op_resolver(self) -> OpResolver:
        """Return what the model resolves op names with."""
        return self._platform.get_op

    def _read_headers(self) -> list[StoredTensor]:
        """Return what the checkpoint's files hold; random weights come from none."""
        model_config = self._config.model_config
        if self._config.load_config.load_format == "dummy":
            return []
        return read_stored_tensors(model_config.path or model_config.model, self._drafts_file)

    def _find_quantization(self, stored: Sequence[StoredTensor]) -> WeightQuantization | None:
        """Return how the model's matrices are kept; None: all are plain."""
        model_config = self._config.model_config
        checkpoint = model_config.path or model_config.model
        found: WeightQuantization | None = None
        described = None
        if is_gguf(checkpoint) and stored:
            return self._find_gguf_weights(checkpoint)
        if self._entry.packs_weights:
            described = read_quantization(model_config.hf_config, checkpoint)
        named = model_config.quantization
        if named in METHOD_NAMES:
            check_named_method(str(named), None if described is None else described.method)
        if stored and described is not None:
            self._check_ascend(named, checkpoint, is_described=False)
            stored = [tensor for tensor in stored if not described.leaves_out(tensor.name)]
            self._stored = stored
            packed = PackedWeights(
                stored,
                described,
                self._model_spec.names.translate,
                self._find_shard,
                inputs=ROUNDED_INPUTS[model_config.quantized_inputs],
                ops=self._make_op_resolver(),
            )
            found, self._find_shard = packed, packed.find_shard
        elif stored:
            found = self._platform.find_quantization(checkpoint, self._find_shard)
            self._check_ascend(named, checkpoint, is_described=found is not None)
            declared = model_config.hf_config.get("quantization_config") or {}
            weights = StoredWeights(
                stored,
                declared,
                self._find_shard,
                ops=self._make_op_resolver(),
                in_panels=self._platform.reads_panels,
            )
            if found is None and weights.is_quantised:
                found = weights
        inputs = ROUNDING_NAMES.get(str(named))
        if inputs is None:
            return found
        is_spread = self._place.size > 1
        if found is not None or is_spread or self._device is None or self._device.type != "cpu":
            reason = (
                "is quantised already"
                if found is not None
                else "is shared by several workers"
                if is_spread
                else "is served elsewhere"
            )
            raise ConfigError(
                f"quantization={named!r} rounds plain weights of one worker on a CPU, but "
                f"{checkpoint} {reason}: leave it out."
            )
        return Int8Weights(
            [tensor.name for tensor in stored] if stored else None,
            inputs,
            ops=self._make_op_resolver(),
        )

    def _check_ascend(self, named: str | None, checkpoint: str, *, is_described: bool) -> None:
        """Refuse ``--quantization ascend`` where the platform reads no such weights."""
        if named == "ascend" and not is_described:
            raise ConfigError(
                "quantization='ascend' means matrices that quant_model_description.json describes, "
                f"read on an Ascend platform: {checkpoint} has none, or this is "
                f"{self._platform.device_name}; leave it out."
            )

    def _find_gguf_weights(self, checkpoint: str) -> WeightQuantization:
        named = self._config.model_config.quantization
        if named not in (None, "none", "gguf"):
            raise ConfigError(
                f"quantization={named!r}, but {checkpoint} is a GGUF file, which says itself how "
                "each tensor is stored: leave it out."
            )
        if self._place.size > 1:
            raise ConfigError(
                f"{checkpoint} is a GGUF file, and packed weights are not shared out to several "
                "workers: use --tensor-parallel-size 1."
            )
        self._gguf = weights = GgufWeights(
            checkpoint,
            self._drafts_file,
            inputs=ROUNDED_INPUTS[self._config.model_config.quantized_inputs],
            ops=self._make_op_resolver(),
            pack=self._platform.find_block_packer(),
        )
        logger.info("GGUF: %s", weights.describe_types())
        return weights

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return what each of the model's caches keeps, by cache name.

        Raises:
            ConfigError: The block size or the cache dtype does not suit the model.
        """
        dtype = resolve_cache_dtype(self._config.cache_config.cache_dtype, self._dtype)
        return {
            name: spec.with_key_sizes(self._key_sizes)
            for name, spec in self._find_specs(dtype).items()
        }

    def _find_specs(self, cache_dtype: torch.dtype) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = self._entry.load_kv_cache_specs()(
            self._entry.cut_config(self._model_spec, self._place.size),
            self._config.cache_config.block_size,
            cache_dtype,
            # Compressor sums run over up to 128 rows; every known implementation keeps them fp32.
            torch.float32,
        )
        return specs

    def determine_available_memory(self) -> int:
        """Return the bytes the KV pool may take, now that the weights are loaded."""
        available = self._platform.default_kv_cache_bytes(self._config)
        is_given = self._platform.fixed_kv_cache_bytes(self._config) is not None
        if self._tower is not None and not is_given:
            # Its weights come with the first picture.
            available = max(0, available - self._tower.num_bytes)
        if self._platform.device_type == "cpu" and not is_given:
            # Workers of one host find the same memory free.
            available //= self._place.local_size
        return available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and become ready for steps.

        Raises:
            ConfigError: The config's layers are not the model's.
        """
        assert self._device is not None, "init_device comes first"
        pool = allocate_kv_cache(
            kv_cache_config, self.get_kv_cache_specs(), self._platform, self._device
        )
        layout = CacheLayout.from_kv_cache_config(kv_cache_config)
        steps = self._make_step_model(layout, pool.layers, self._device)
        pictures = self._make_pictures(steps)
        self._runner = ModelRunner(
            steps.model,
            pool,
            partial(steps.build_metadata, layout=layout),
            RunnerLimits(
                num_groups=len(kv_cache_config.kv_cache_groups),
                max_num_tokens=self._config.scheduler_config.max_num_batched_tokens,
                max_model_len=self._config.model_config.max_model_len,
                vocab_size=self._model_spec.vocab_size,
                seed=self._config.model_config.seed,
                num_previous_tokens=self._num_previous_tokens,
                keeps_all=self._config.cache_config.enable_prefix_caching
                or self._config.kv_transfer_config is not None,
                both_ways="nowhere" if self._tower is None else self._model_spec.images.both_ways,
            ),
            make_connector_steps(self._config, kv_cache_config, pool.layers, self._place.rank),
            make_proposer(
                self._config.speculative_config,
                steps,
                layout,
                pool.layers,
                self._device,
                self._model,
                None if pictures is None else pictures.build,
            ),
            steps.draw_tokens,
            steps.settle_drafts,
            steps.forbid_tokens,
            pictures,
        )

    def _make_step_model(
        self, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor], device: torch.device
    ) -> StepModel:
        """Return what runs the model's steps."""
        return self._platform.make_step_model(self._model, layout, kv_caches, device)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            EngineError: The worker is not ready, or was shut down.
        """
        return self._require_runner().execute_model(scheduler_output)

    def begin_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Begin one step; see ``ModelRunner.begin_model``.

        Raises:
            EngineError: The worker is not ready, or was shut down.
        """
        return self._require_runner().begin_model(scheduler_output)

    def _require_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("the worker has no KV cache: initialize_from_config comes first")
        return self._runner

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return what the last step drafted, once; None without a drafter."""
        return None if self._runner is None else self._runner.take_draft_token_ids()

    def bind_wake(self, wake: Callable[[], None]) -> bool:
        """Hand on what rouses the engine core; returns whether it is called when need be."""
        return self._runner is None or self._runner.bind_wake(wake)

    def shutdown(self) -> None:
        """Drop the model and the KV cache; idempotent."""
        if self._runner is not None:
            self._runner.shutdown()
        self._runner = None
        self._model = None
        self._group.close()
        self._group = SingleProcessGroup()
