"""Checkpoints of compressed-tensors, AWQ and GPTQ: packed while they are loaded.

    .weight_packed  .weight_scale  [.weight_zero_point]  .weight_shape   compressed-tensors
    .weight (I8)    .weight_scale                                        the same, int-quantized
    .weight (F8)    .weight_scale                                        the same, float-quantized
    .qweight        .scales        .qzeros               [.g_idx]        AWQ, GPTQ

Which modules are quantised, and how, is the config's; a module of which the files hold plain values
only is plain whatever the config says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.code_layouts import (
    read_fp8_codes,
    read_mxfp4_codes,
    read_mxfp8_codes,
    read_nvfp4_codes,
)
from vllm.model_executor.layers.quantization.interface import ExpertsSpec, MatrixSpec
from vllm.model_executor.layers.quantization.packing_storage import Convert, PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows, unit_of
from vllm.model_executor.layers.quantization.storages import Fp8Blocks, Storage
from vllm.model_executor.model_loader.coded_matrix import CodedMatrix, RawTensors
from vllm.model_executor.model_loader.integer_codes import TAKE_INTEGERS
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.model_executor.model_loader.packed_shards import PackedShards, refuse_cut_codes
from vllm.model_executor.model_loader.quantization_config import QuantizationConfig, WeightScheme
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.model_loader.shards import ELSEWHERE, Shard, ShardFinder, find_whole
from vllm.model_executor.model_loader.stored_weights import find_block_size
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.ops.stored import Inputs

logger = init_logger(__name__)

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# DeepSeek's name for a scale that is multiplied by as any other.
_INVERSE = ".weight_scale_inv"
_SMALL_FLOATS = ("nvfp4", "mxfp4", "mxfp8")


class PackedWeights(MatrixStorages):
    """A ``WeightQuantization`` read from a config and the files' headers.

    Args:
        stored: What the files hold.
        config: What the checkpoint says about it.
        translate: Gives the name that the model asks by, of that in the files; None: they are one.
        find_shard: Tells which part of a plain tensor this rank holds.
        inputs: What inputs of matrices of four bits are rounded to.
        ops: Resolves op names.
    """

    def __init__(
        self,
        stored: Iterable[StoredTensor],
        config: QuantizationConfig,
        translate: Callable[[str], str] | None = None,
        find_shard: ShardFinder = find_whole,
        *,
        inputs: Inputs = "whole",
        ops: OpResolver = get_reference_op,
    ) -> None:
        super().__init__(ops)
        self._config = config
        self._inputs: Inputs = inputs
        for note in config.notes:
            logger.warning("%s", note)
        # By the model's name: the tensor and its module's name in the file.
        self._tensors = {
            tensor.name if translate is None else translate(tensor.name): tensor
            for tensor in stored
        }
        self._shards = PackedShards(find_shard, self._tensors)

    def find_shard(self, name: str) -> Shard | None:
        """Return which part of a tensor, packed or plain, this rank holds."""
        return self._shards.find(name)

    def _find_storage(self, spec: MatrixSpec) -> Storage | None:
        anchor = self._find_anchor(spec.name)
        if anchor is None:
            return None
        stored_name = anchor.name.rpartition(".")[0]
        scheme = self._config.find_scheme(stored_name)
        if scheme is None:
            if anchor.dtype in _FLOATS:
                return None
            raise CheckpointError(
                f"Tensor {anchor.name} of {anchor.file.name} is of type {anchor.dtype}, but the "
                f"checkpoint's config ({self._config.method}) leaves {stored_name} plain."
            )
        if anchor.dtype in _FLOATS:
            logger.debug("%s is plain although the config quantises it", stored_name)
            return None
        return self._make_storage(spec.name, scheme, spec.out_size, spec.in_size, spec.device)

    def make_experts(self, spec: ExpertsSpec) -> None:
        """See ``WeightQuantization``: DeepSeek-V4's experts are stored in other formats.

        Raises:
            UnsupportedFeatureError: Always.
        """
        raise UnsupportedFeatureError(
            f"the experts of {spec.prefix.rstrip('.')} are quantised by "
            f"{self._config.method}, which is not served for this architecture: use its FP8 and "
            "FP4 release."
        )

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return any(name.startswith(prefix) for name in self._tensors)

    def plain_dtype(self, names: Sequence[str]) -> torch.dtype | None:
        """See ``WeightQuantization``: plain tensors beside packed ones stay as stored."""
        dtypes = {self._tensors[name].dtype for name in names if name in self._tensors}
        if len(dtypes) != 1:
            return None
        return torch.bfloat16 if dtypes == {"BF16"} else None

    def _find_anchor(self, name: str) -> StoredTensor | None:
        for suffix in (".weight_packed", ".qweight", ".weight"):
            if (tensor := self._tensors.get(name + suffix)) is not None:
                return tensor
        return None

    def _make_storage(
        self, name: str, scheme: WeightScheme, rows: int, columns: int, device: torch.device
    ) -> Storage:
        if scheme.format == "fp8":
            return self._make_fp8(name, scheme, rows, columns, device)
        make = RawTensors(name, self._tensors, device)
        shard = self._shards.of_matrix(name)
        whole = _whole_size(shard, rows, columns)
        matrix = CodedMatrix(name, scheme, (rows, columns), whole, shard, make)
        words_of_outputs = scheme.format in ("gptq", "awq") or not scheme.is_symmetric
        refuse_cut_codes(
            name,
            matrix.size,
            matrix.width if words_of_outputs else 1,
            scheme.group or matrix.width,
            shard,
        )
        if scheme.format == "mxfp8" and device.type != "cpu":
            # Panels of such codes are kept by CPUs alone.
            shape = (rows, matrix.num_groups)
            scales = torch.empty(shape, dtype=torch.uint8, device=device)
            block = (1, scheme.group)
            return Fp8Blocks(rows, columns, block, scales, (".weight_scale", shape))
        if scheme.format in _SMALL_FLOATS:
            convert = self._take_small_floats(name, scheme, matrix.size, make)
        else:
            convert = TAKE_INTEGERS[scheme.format](matrix)
        return PackingStorage(rows, columns, make.raw, convert, self._find_inputs(scheme))

    def _take_small_floats(
        self, name: str, scheme: WeightScheme, size: tuple[int, int], make: RawTensors
    ) -> Convert:
        """Makes the destinations of NVFP4, MXFP4 or MXFP8, and returns what reads them."""
        rows, columns = size
        is_modelopt = self._config.method == "modelopt"
        codes = ".weight" if is_modelopt or scheme.bits == 8 else ".weight_packed"
        stored = self._tensors.get(name + codes) or self._find_anchor(name)
        assert stored is not None, "only what is stored has a scheme"
        allowed = ("F8_E4M3",) if scheme.bits == 8 else ("U8", "I8", "F4")
        if stored.dtype not in allowed or not stored.name.endswith(codes):
            raise UnsupportedFeatureError(
                f"Tensor {stored.name} of {stored.file.name} is of type {stored.dtype}, but by the "
                f"checkpoint's config ({self._config.method}) its module is {scheme.format}, with "
                f"a {codes.removeprefix('.')} of {'/'.join(allowed)}: use a release whose config "
                "says how this module is stored."
            )
        group = scheme.group
        if columns % group:
            raise CheckpointError(
                f"{name} has {columns} inputs, which are not whole groups of {group}, as "
                f"{scheme.format} has them: config.json describes another model than the weights."
            )
        scales = (rows, columns // group)
        if scheme.format == "mxfp8":
            make.take(codes, torch.float8_e4m3fn, (rows, columns))
            make.take(".weight_scale", torch.float8_e8m0fnu, scales)
            return lambda raw: read_mxfp8_codes(
                name,
                raw[codes].view(torch.uint8),
                raw[".weight_scale"].view(torch.uint8),
                group,
            )
        make.take(codes, torch.uint8, (rows, columns // 2))
        if scheme.format == "mxfp4":
            make.take(".weight_scale", torch.float8_e8m0fnu, scales)
            return lambda raw: read_mxfp4_codes(
                raw[codes], raw[".weight_scale"].view(torch.uint8), group
            )
        whole = ".weight_scale_2" if is_modelopt else ".weight_global_scale"
        make.take(".weight_scale", torch.float8_e4m3fn, scales)
        make.take_one(whole)
        return lambda raw: read_nvfp4_codes(
            name,
            raw[codes],
            raw[".weight_scale"],
            (whole, raw[whole]),
            divides=not is_modelopt,
        )

    def _find_inputs(self, scheme: WeightScheme) -> Inputs:
        """Returns what the checkpoint asks for, else, of four bits, what the user does."""
        if scheme.inputs is not None:
            return scheme.inputs
        # Products of bytes know no NF4.
        can_round = scheme.bits == 4 and scheme.format != "nf4"
        return self._inputs if can_round else "whole"

    def _make_fp8(
        self, name: str, scheme: WeightScheme, rows: int, columns: int, device: torch.device
    ) -> Storage:
        weight = self._tensors[f"{name}.weight"]
        suffix = ".weight_scale" if f"{name}.weight_scale" in self._tensors else _INVERSE
        scale = self._tensors.get(name + suffix)
        if weight.dtype != "F8_E4M3":
            raise UnsupportedFeatureError(
                f"Tensor {weight.name} of {weight.file.name} is of type {weight.dtype}: as "
                "float-quantized F8_E4M3 is served."
            )
        if scale is None:
            raise CheckpointError(
                f"Tensor {weight.name} of {weight.file.name} is quantised, but the checkpoint has "
                f"neither {name}.weight_scale nor {name}{_INVERSE}: download it again."
            )
        # A scale of the whole, one of each row, or a grid of them.
        grid = (*scale.shape, 1, 1)[:2] if len(scale.shape) <= 2 else (0, 0)
        declared = scheme.block if scheme.block != (0, 0) else (None, None)
        shard = self._shards.of_matrix(name)
        whole = _whole_size(shard, rows, columns)
        block_rows = find_block_size(whole[0], grid[0], declared[0]) if grid[0] else None
        block_columns = find_block_size(whole[1], grid[1], declared[1]) if grid[1] else None
        if block_rows is None or block_columns is None:
            raise CheckpointError(
                f"Tensor {scale.name} is {list(scale.shape)}, which is no grid of scales of "
                f"{weight.name} ({[rows, columns]})."
            )
        together = [
            block if count > 1 else 1
            for block, count in zip((block_rows, block_columns), grid, strict=True)
        ]
        refuse_cut_codes(name, (rows, columns), together[0], together[1], shard)
        scale_shape = scale.shape
        if shard is not None and shard is not ELSEWHERE and grid[shard.axis] > 1:
            scale_shape = shard.cut_shape(scale.shape)
            grid = (*scale_shape, 1)[:2]
        block = (block_rows, block_columns)
        cuts_words = grid[1] > 1 and block_columns % unit_of("e4m3").num_codes
        if cuts_words or device.type != "cpu":
            scales = torch.empty(grid, dtype=torch.float32, device=device)
            return Fp8Blocks(rows, columns, block, scales, (suffix, scale_shape))
        raw = {
            ".weight": torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device),
            suffix: torch.empty(scale_shape, dtype=torch.float32, device=device),
        }

        def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
            codes = raw[".weight"].view(torch.uint8)
            return read_fp8_codes(name, codes, raw[suffix].view(grid), block)

        return PackingStorage(rows, columns, raw, convert)


def _whole_size(shard: Shard | None, rows: int, columns: int) -> tuple[int, int]:
    if shard is None or shard is ELSEWHERE:
        return rows, columns
    whole_rows, whole_columns = shard.whole_shape((rows, columns))
    return whole_rows, whole_columns
