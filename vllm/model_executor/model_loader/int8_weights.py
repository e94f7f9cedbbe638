"""Matrices rounded to eight bits a value while they are loaded: ``--quantization int8``.

With ``w8a8_int8`` the inputs of products are rounded as well, row by row.
"""

from collections.abc import Mapping, Sequence

import torch

from vllm.exceptions import CheckpointError
from vllm.model_executor.layers.quantization.code_layouts import read_int8_codes
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
# Asked for where experts' gate and up alternate, which files have in one stack.
_STACKED = ".gate_up_proj"


class Int8Weights(MatrixStorages):
    """A ``WeightQuantization`` that a checkpoint of plain weights is loaded through.

    Every matrix that a layer asks for by name gets one scale per row, the output head among them.
    Embeddings that are no head, routers and gpt-oss's stacked experts stay as they are.

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

    def _find_storage(
        self, name: str, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device
    ) -> PackingStorage | None:
        if name.endswith(_STACKED) or (name in _HEADS and not self._is_rounded_head(name)):
            return None
        return make_rounding(name, out_size, in_size, dtype, device, self._inputs)

    def _is_rounded_head(self, name: str) -> bool:
        """Whether a table is what logits are products with: an embedding is where it is tied."""
        has_head = self._names is not None and any("lm_head." in own for own in self._names)
        return name == "lm_head" or not has_head

    def make_experts(
        self,
        prefix: str,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        limit: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StoredExperts:
        """See ``WeightQuantization``."""

        def make_expert() -> StoredExpert:
            sizes = (inner_size, hidden_size), (inner_size, hidden_size), (hidden_size, inner_size)
            gate, up, down = (
                make_rounding(prefix, *size, dtype, device, self._inputs) for size in sizes
            )
            return StoredExpert(gate, up, down)

        routed = [make_expert() for _ in range(num_experts)]
        made = StoredExperts(prefix, routed, make_expert(), limit, self._ops)
        self._made.append(made)
        return made

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return self._names is None or any(name.startswith(prefix) for name in self._names)

    def plain_dtype(self, names: Sequence[str]) -> None:
        """See ``WeightQuantization``: the type that the model asks for."""


def make_rounding(
    name: str,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    inputs: Inputs = "whole",
) -> PackingStorage:
    """Return a storage that takes plain values and keeps the nearest of 255 steps of their row.

    Args:
        name: The matrix's published name, or that of its layer, for messages.
        num_rows: Outputs.
        num_columns: Inputs.
        dtype: Of the plain values.
        device: Where they live.
        inputs: What products' inputs are rounded to.
    """
    plain = torch.empty((num_rows, num_columns), dtype=dtype, device=device)

    def convert(raw: Mapping[str, torch.Tensor]) -> CodedRows:
        return round_rows(raw[".weight"], name)

    return PackingStorage(num_rows, num_columns, {".weight": plain}, convert, inputs)


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
