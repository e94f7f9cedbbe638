"""Weights that stay as their checkpoint stores them: the seam, the formats, the decoders.

A model asks its ``TensorFactory`` for each matrix by published name; where the checkpoint's
``WeightQuantization`` knows the name, the layer keeps no weight of its own and calls what it got.
"""

from vllm.model_executor.layers.quantization.interface import (
    ExpertsSpec,
    MatrixSpec,
    QuantisedExperts,
    QuantisedMatrix,
    RowDecoder,
    WeightQuantization,
)

__all__ = [
    "ExpertsSpec",
    "MatrixSpec",
    "QuantisedExperts",
    "QuantisedMatrix",
    "RowDecoder",
    "WeightQuantization",
]
