"""What models for generation have in common: what they are built from."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import nn

from vllm.distributed.parallel_state import SingleProcessGroup, TensorParallelGroup
from vllm.model_executor.layers.linear import TensorFactory
from vllm.model_executor.layers.quantization import WeightQuantization
from vllm.v1.attention.ops.registry import OpResolver

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, slots=True)
class PartsOf(Generic[ConfigT]):
    """What every module of a model is built from."""

    config: ConfigT
    ops: OpResolver
    make: TensorFactory

    def within(self, prefix: str) -> "PartsOf[ConfigT]":
        """Returns the parts for modules whose published names begin with ``prefix``."""
        return replace(self, make=self.make.within(prefix))


class CausalLM(nn.Module, Generic[ConfigT]):
    """A model for generation.

    Weights are allocated uninitialised; a loader fills ``weight_slots``. Call it under
    ``torch.inference_mode``.

    Args:
        config: The architecture.
        ops: Resolves op names; a platform's ``get_op``.
        dtype: Type of weights and activations, but for those that the model keeps in fp32.
        device: Where the weights live.
        group: The processes that share the model.
        quantization: Which matrices the checkpoint stores in another way; None: none.
    """

    def __init__(
        self,
        config: ConfigT,
        *,
        ops: OpResolver,
        dtype: torch.dtype,
        device: torch.device | str,
        group: TensorParallelGroup | None = None,
        quantization: WeightQuantization | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        make = TensorFactory(
            dtype, torch.device(device), group or SingleProcessGroup(), ops, quantization
        )
        self._build(PartsOf(config, ops, make))

    @abstractmethod
    def _build(self, parts: PartsOf[ConfigT]) -> None:
        """Makes the model's modules."""
