"""Products with plain weights that may be kept in a narrower type than the activations."""

from collections.abc import Callable

import torch

from vllm.model_executor.layers.quantization.storages import PlainRows
from vllm.v1.attention.ops.registry import Op

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def multiply_plain(
    x: torch.Tensor, weight: torch.Tensor, linear: Linear, stored_linear: Op
) -> torch.Tensor:
    """``linear`` of [T, in] by a weight [out, in]; one of another type is widened as it is used.

    Args:
        x: [T, in].
        weight: [out, in].
        linear: The platform's op of plain matrices.
        stored_linear: Its op of stored ones.
    """
    if weight.dtype == x.dtype:
        return linear(x, weight)
    product: torch.Tensor = stored_linear(x, PlainRows(weight))
    return product
