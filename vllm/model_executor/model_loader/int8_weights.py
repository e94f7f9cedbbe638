"""Matrices rounded to eight bits a value while they are loaded: ``--quantization int8``."""

from collections.abc import Sequence

import torch

from vllm.model_executor.layers.quantization.storages import Int8Rows
from vllm.model_executor.layers.quantization.stored_matrix import StoredExpert, StoredExperts
from vllm.model_executor.model_loader.matrix_storages import MatrixStorages

_TABLES = ("model.embed_tokens", "lm_head")
# Asked for where experts' gate and up alternate, which files have in one stack.
_STACKED = ".gate_up_proj"


class Int8Weights(MatrixStorages):
    """A ``WeightQuantization`` that a checkpoint of plain weights is loaded through.

    Every matrix that a layer asks for by name gets one scale per row. Embeddings, the output head,
    routers and gpt-oss's stacked experts stay as they are.

    Args:
        names: Names of the checkpoint's tensors; None: all that a model asks for are there.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        super().__init__()
        self._names = names

    def _find_storage(
        self, name: str, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device
    ) -> Int8Rows | None:
        if name in _TABLES or name.endswith(_STACKED):
            return None
        return Int8Rows(out_size, in_size, dtype, device)

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
            return StoredExpert(
                gate=Int8Rows(inner_size, hidden_size, dtype, device),
                up=Int8Rows(inner_size, hidden_size, dtype, device),
                down=Int8Rows(hidden_size, inner_size, dtype, device),
            )

        routed = [make_expert() for _ in range(num_experts)]
        made = StoredExperts(prefix, routed, make_expert(), limit)
        self._made.append(made)
        return made

    def has_part(self, prefix: str) -> bool:
        """See ``WeightQuantization``."""
        return self._names is None or any(name.startswith(prefix) for name in self._names)

    def plain_dtype(self, names: Sequence[str]) -> None:
        """See ``WeightQuantization``: the type that the model asks for."""
