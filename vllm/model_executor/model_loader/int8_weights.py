"""Matrices rounded to eight bits a value while they are loaded: ``--quantization int8``.

With ``w8a8_int8`` the inputs of products are rounded as well, row by row.
"""

from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.code_layouts import read_int8_codes
from vllm.model_executor.layers.quantization.interface import ExpertsSpec, MatrixSpec
from vllm.model_executor.layers.quantization.packing_storage import PackingStorage
from vllm.model_executor.layers.quantization.panels import CodedRows
from vllm.model_executor.layers.quantization.stored_matrix import StoredExpert, StoredExperts
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages
from vllm.v1.attention.ops.registry import OpResolver, get_reference_op
from vllm.v1.attention.ops.stored import Inputs

_HEADS = ("model.embed_tokens", "lm_head")
_MAX = 127
# What people type -> what products' inputs are rounded to.
ROUNDING_NAMES: Mapping[str, Inputs] = {
    "int8": "whole",
    "int8_per_channel_weight_only": "whole",
    "w8a8_int8": "bytes by row",
}
# Where experts' gate and up alternate, which files have in one stack; and of DeepSeek-V4 the
# compressors and the indexer's weights, its embedding and its head.
_EXACT = (".gate_up_proj", ".compressor.wkv", ".compressor.wgate", ".indexer.weights_proj")
_EXACT_TABLES = ("embed", "head")


class Int8Weights(MatrixStorages):
    """A ``WeightQuantization`` that a checkpoint of plain weights is loaded through.

    Every matrix that a layer asks for by name gets one scale per row, the output head among them.
    Embeddings that are no head, routers, gpt-oss's stacked experts and what DeepSeek-V4 computes in
    more than eight bits stay as they are.

    Args:
        names: Names of the checkpoint's tensors; None: all that a model asks for are there.
        inputs: What products' inputs are rounded to.
        ops: Resolves op names.
    """

    def __init__(
        self,
        names: Sequence[str] | None,
        inputs: Inputs = "whole",
        *,
        ops: OpResolver = get_reference_op,
    ) -> None:
        super().__init__(ops)
        self._names, self._inputs = names, inputs

    def _find_storage(self, spec: MatrixSpec) -> PackingStorage | None:
        name = spec.name
        is_kept = name.endswith(_EXACT) or name in _EXACT_TABLES
        if is_kept or (name in _HEADS and not self._is_rounded_head(name)):
            return None
        return make_rounding(spec, self._inputs)

    def _is_rounded_head(self, name: str) -> bool:
        """Whether a table is what logits are products with: an embedding is where it is tied."""
        has_head = self._names is not None and any("lm_head." in own for own in self._names)
        return name == "lm_head" or not has_head

    @override
    def make_experts(self, spec: ExpertsSpec) -> StoredExperts:
        def make_expert() -> StoredExpert:
            hidden, inner = spec.hidden_size, spec.inner_size
            gate, up, down = (
                make_rounding(
                    MatrixSpec(spec.prefix, columns, rows, spec.dtype, spec.device), self._inputs
                )
                for columns, rows in ((hidden, inner), (hidden, inner), (inner, hidden))
            )
            return StoredExpert(gate, up, down)

        routed = [make_expert() for _ in range(spec.num_experts)]
        made = StoredExperts(spec.prefix, routed, make_expert(), spec.limit, self._ops)
        self._made.append(made)
        return made

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return self._names is None or any(name.startswith(prefix) for name in self._names)

    def plain_dtype(self, names: Sequence[str]) -> None:
        """See ``WeightQuantization``: the type that the model asks for."""


def make_rounding(spec: MatrixSpec, inputs: Inputs = "whole") -> PackingStorage:
    """Return a storage that takes plain values and keeps the nearest of 255 steps of their row.

    Args:
        spec: The matrix; its name, or that of its layer, is for messages.
        inputs: What products' inputs are rounded to.
    """
    plain = torch.empty((spec.out_size, spec.in_size), dtype=spec.dtype, device=spec.device)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        return round_rows(raw[".weight"], spec.name)

    return PackingStorage(spec.out_size, spec.in_size, {".weight": plain}, convert, inputs)


def round_rows(plain: torch.Tensor, name: str) -> CodedRows:
    """Return plain values [rows, columns] as the nearest of 255 steps of their row.

    Raises:
        CheckpointError: One is no number.
    """
    wide = plain.float()
    peaks = wide.abs().amax(1)
    if not peaks.isfinite().all():
        raise CheckpointError(f"{name}.weight holds a value that is no number: download it again.")
    scales = torch.where(peaks > 0, peaks / _MAX, 1.0)[:, None]
    return read_int8_codes((wide / scales).round().to(torch.int8), scales, 0)
