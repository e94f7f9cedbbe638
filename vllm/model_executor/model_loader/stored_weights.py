"""From the headers of a checkpoint to the storages of its quantised matrices.

What a tensor is follows from its type and shape; the config is asked only where these leave a
choice, as repacked checkpoints often keep a config that no longer describes them.

    .weight            shape       .scale                    storage
    F8_E4M3            [out, in]   [row blocks, col blocks]  panels, or Fp8Blocks
    I8, U8 or F4       [out, in/2] [out, groups]             panels, or Fp4Groups (F4 is counted by
                                                             value: in)
    BF16, F16, F32     [out, in]   none                      plain

CPUs read panels, unless a block ends within a word of codes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from vllm.exceptions import CheckpointError, ConfigError, UnsupportedFeatureError
from vllm.model_executor.layers.quantization.code_layouts import read_fp8_codes, read_mxfp4_codes
from vllm.model_executor.layers.quantization.interface import ExpertsSpec, MatrixSpec
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows, unit_of
from vllm.model_executor.layers.quantization.storages import (
    Fp4Groups,
    Fp8Blocks,
    Storage,
    check_scales,
    scale_slot,
)
from vllm.model_executor.layers.quantization.stored_matrix import StoredExperts
from vllm.model_executor.model_loader.load_plan import DSPARK_MARK, Copy, part_shape
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import Shard, ShardFinder, find_whole
from vllm.model_executor.model_loader.weight_names import published_parts
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op

_BYTE_SCALES = frozenset({"F8_E8M0", "U8"})
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_NARROW_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16}
_NIBBLES = frozenset({"I8", "U8"})
_QUANTISED = frozenset({"F8_E4M3", "F4"}) | _NIBBLES
_DEFAULT_BLOCK_SHAPE = (128, 128)
_MTP = "mtp."


class StoredWeights(MatrixStorages):
    """A ``WeightQuantization`` read from safetensors headers.

    Args:
        stored: What the files hold.
        quantization_config: The config's, or empty; see the module docstring.
        find_shard: Tells which part of a tensor this rank holds.
        ops: Resolves op names.
        in_panels: Whether matrices are packed into panels, as a CPU's kernels read them.
    """

    def __init__(
        self,
        stored: Iterable[StoredTensor],
        quantization_config: Mapping[str, Any],
        find_shard: ShardFinder = find_whole,
        *,
        ops: OpResolver = get_reference_op,
        in_panels: bool = True,
    ) -> None:
        super().__init__(ops)
        self._in_panels = in_panels
        self._find_shard = find_shard
        self._tensors: dict[str, StoredTensor] = {}
        for tensor in stored:
            for part in published_parts(tensor.name, tensor.shape):
                shape = part_shape(Copy(tensor, part))
                self._tensors[part.name] = StoredTensor(
                    tensor.name, shape, tensor.dtype, tensor.file
                )
        self._block_shape = _read_block_shape(quantization_config)
        self.is_quantised = any(
            tensor.dtype in _QUANTISED and name.endswith(".weight")
            for name, tensor in self._tensors.items()
        )

    def _find_storage(self, spec: MatrixSpec) -> Storage | None:
        return self._make_storage(spec.name, spec.out_size, spec.in_size, spec.device)

    def make_experts(self, spec: ExpertsSpec) -> StoredExperts | None:
        """See ``WeightQuantization``; plain ones among quantised ones are kept as stored."""
        if not self.is_quantised:
            return None
        return self._make_experts(spec)

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``; a DSpark drafter is no multi-token-prediction block."""
        if prefix == _MTP and DSPARK_MARK in self._tensors:
            return False
        return any(name.startswith(prefix) for name in self._tensors)

    @override
    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        if not self.is_quantised:
            return None
        dtypes = {self._tensors[name].dtype for name in names if name in self._tensors}
        return _NARROW_FLOATS.get(dtypes.pop()) if len(dtypes) == 1 else None

    def _make_storage(
        self, name: str, num_rows: int, num_columns: int, device: torch.device
    ) -> Storage | None:
        """Returns the storage of this rank's part of a quantised matrix, [num_rows, num_columns].

        None for a plain or an absent one.
        """
        weight = self._tensors.get(f"{name}.weight")
        if weight is None or weight.dtype in _FLOATS:
            return None
        shard = self._find_shard(f"{name}.weight")
        whole = (num_rows, num_columns)
        if shard is not None:
            num_rows, num_columns = shard.whole_shape(whole)
            whole = (num_rows, num_columns)
        if weight.dtype == "F8_E4M3":
            _check_shape(weight, whole)
            return self._make_fp8(name, weight, shard, device)
        if weight.dtype in _NIBBLES and f"{name}.scale" in self._tensors:
            _check_shape(weight, (num_rows, num_columns // 2))
            return self._make_fp4(name, weight, num_columns, shard, device)
        if weight.dtype == "F4":
            _check_shape(weight, whole)
            return self._make_fp4(name, weight, num_columns, shard, device)
        if weight.dtype in _NIBBLES and weight.shape == whole:
            raise UnsupportedFeatureError(
                f"Tensor {weight.name} of {weight.file.name} holds whole numbers of eight bits "
                f"({weight.dtype}, one to a byte), and config.json has no quantization_config that "
                "says what they stand for: bring back the config that the weights were published "
                "with, or serve a release in BF16 with --quantization int8."
            )
        raise UnsupportedFeatureError(
            f"Tensor {weight.name} of {weight.file.name} is of type {weight.dtype}"
            f"{_MISSING_SCALE if weight.dtype in _NIBBLES else ''}: supported are F8_E4M3, FP4 "
            "(two to a byte, I8 or U8, with a .scale), BF16, F16 and F32. Convert it."
        )

    def _make_fp8(
        self, name: str, weight: StoredTensor, shard: Shard | None, device: torch.device
    ) -> Storage:
        scale = self._find_scale(name, weight)
        rows, columns = weight.shape
        block_rows = find_block_size(rows, scale.shape[0], self._block_shape[0])
        block_columns = find_block_size(columns, scale.shape[1], self._block_shape[1])
        if block_rows is None or block_columns is None:
            raise _misfit(weight, scale)
        block_shape = (block_rows, block_columns)
        _check_cut(weight, (rows, columns), block_shape, shard)
        rows, columns = _cut(shard, (rows, columns))
        scales = _empty_scales(scale, shard, device)
        cuts_words = scales.shape[1] > 1 and block_columns % unit_of("e4m3").num_codes
        if not self._in_panels or cuts_words:
            return Fp8Blocks(rows, columns, block_shape, scales)

        def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
            check_scales(name, scales)
            codes = raw[".weight"].view(torch.uint8)
            return read_fp8_codes(name, codes, scales, block_shape)

        codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
        raw = {".weight": codes, ".scale": scale_slot(scales)}
        return PackingStorage(rows, columns, raw, convert)

    def _make_fp4(
        self,
        name: str,
        weight: StoredTensor,
        num_columns: int,
        shard: Shard | None,
        device: torch.device,
    ) -> Storage:
        scale = self._find_scale(name, weight)
        rows = weight.shape[0]
        group_size = find_block_size(num_columns, scale.shape[1])
        if group_size is None or scale.shape[0] != rows or num_columns % 2:
            raise _misfit(weight, scale)
        _check_cut(weight, (rows, num_columns), (1, group_size), shard)
        rows, columns = _cut(shard, (rows, num_columns))
        scales = _empty_scales(scale, shard, device)
        if not self._in_panels or group_size % unit_of("e2m1").num_codes:
            return Fp4Groups(rows, columns, group_size, scales)

        def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
            check_scales(name, scales)
            return read_mxfp4_codes(raw[".weight"], scales, group_size)

        codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=device)
        raw = {".weight": codes, ".scale": scale_slot(scales)}
        return PackingStorage(rows, columns, raw, convert)

    def _find_scale(self, name: str, weight: StoredTensor) -> StoredTensor:
        scale = self._tensors.get(f"{name}.scale")
        if scale is None:
            raise CheckpointError(
                f"Tensor {weight.name} of {weight.file.name} is quantised ({weight.dtype}), but "
                f"the checkpoint has no {name}.scale: its values mean nothing without. Download "
                "or convert the checkpoint again."
            )
        if scale.dtype not in _BYTE_SCALES | _FLOATS:
            raise UnsupportedFeatureError(
                f"Tensor {scale.name} of {scale.file.name} holds scales of type {scale.dtype}: "
                "supported are F8_E8M0 (also as U8), F32, F16 and BF16. Convert it."
            )
        if len(scale.shape) != 2 or 0 in scale.shape:
            raise _misfit(weight, scale)
        return scale


_MISSING_SCALE = " and has no .scale of its name"


def find_block_size(size: int, num_blocks: int, declared: int | None = None) -> int | None:
    """Return how many of ``size`` rows or columns share one of ``num_blocks`` scales.

    The declared size where it fits, else the power of two that does (of two or more blocks only
    one can), else an equal share; None: nothing fits.
    """
    if declared is not None and -(-size // declared) == num_blocks:
        return declared
    block = 1
    while -(-size // block) > num_blocks:
        block *= 2
    if -(-size // block) == num_blocks:
        return block
    return size // num_blocks if size % num_blocks == 0 else None


def _read_block_shape(quantization_config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the declared rows and columns of a block of FP8; only a hint, so never an error."""
    declared = quantization_config.get("weight_block_size")
    if (
        isinstance(declared, list | tuple)
        and len(declared) == 2
        and all(isinstance(size, int) and size > 0 for size in declared)
    ):
        return declared[0], declared[1]
    return _DEFAULT_BLOCK_SHAPE


def _empty_scales(scale: StoredTensor, shard: Shard | None, device: torch.device) -> torch.Tensor:
    dtype = torch.uint8 if scale.dtype in _BYTE_SCALES else torch.float32
    return torch.empty(_cut(shard, scale.shape), dtype=dtype, device=device)


def _cut(shard: Shard | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if shard is None else shard.cut_shape(shape)


def _check_cut(
    weight: StoredTensor,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    shard: Shard | None,
) -> None:
    """Refuse a boundary between ranks that falls within a block of values under one scale."""
    if shard is None:
        return
    part, block = shard.find_range(shape[shard.axis])[1], block_shape[shard.axis]
    if part % block:
        raise ConfigError(
            f"Tensor {weight.name} of {weight.file.name} ({weight.dtype} {list(shape)}) has one "
            f"scale for {block} {'rows' if shard.axis == 0 else 'columns'}, and {shard.count} "
            f"ranks would get {part} each, which cuts a block: use a --tensor-parallel-size that "
            "leaves whole blocks, or --enable-expert-parallel where the tensor is an expert's."
        )


def _check_shape(weight: StoredTensor, wanted: tuple[int, int]) -> None:
    if weight.shape != wanted:
        raise CheckpointError(
            f"Tensor {weight.name} of {weight.file.name} ({weight.dtype}) is {list(weight.shape)}, "
            f"but the model that config.json describes needs {list(wanted)}."
        )


def _misfit(weight: StoredTensor, scale: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"Tensor {scale.name} is {list(scale.shape)}, which is no grid of scales of {weight.name} "
        f"({weight.dtype} {list(weight.shape)}): FP8 takes one scale per block, FP4 one per group "
        "of a row."
    )
