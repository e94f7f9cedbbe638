"""What models for generation have in common: what they are built from."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import nn

from vllm.distributed.parallel_state import SingleProcessGroup, TensorParallelGroup
from vllm.model_executor.layers.linear import TensorFactory
from vllm.model_executor.layers.quantization import WeightQuantization
from vllm.model_executor.layers.quantization.bf16_panels import PackedWeights
from vllm.model_executor.model_loader.shards import RankShare
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.attention.ops.registry import OpResolver
from vllm.v1.attention.step_tables import StepMetadata

ConfigT = TypeVar("ConfigT")
# Modules of a family take the parts of each of its members.
PartsConfigT = TypeVar("PartsConfigT", covariant=True)


@dataclass(frozen=True, slots=True)
class PartsOf(Generic[PartsConfigT]):
    """What every module of a model is built from."""

    config: PartsConfigT
    ops: OpResolver
    make: TensorFactory

    def within(self, prefix: str) -> "PartsOf[PartsConfigT]":
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
        spreads_experts: Whether the processes hold whole experts, not a part of each.
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
        spreads_experts: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        # Filled by who runs the model by other code than its modules'.
        self.packed: PackedWeights | None = None
        self.is_quantised = quantization is not None
        group = group or SingleProcessGroup()
        self.share = RankShare(group.rank, group.size, spreads_experts and group.size > 1)
        make = TensorFactory(
            dtype, torch.device(device), group, ops, quantization, share=self.share
        )
        self._build(PartsOf(config, ops, make))

    @property
    def num_previous_tokens(self) -> int:
        """How many tokens before a step's own the model reads the ids of."""
        return 0

    def bind_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Takes the tokenizer, where the model reads tokens' texts; None: its weights are random.

        Raises:
            CheckpointError: It is not the one that the weights were trained with.
        """

    @abstractmethod
    def _build(self, parts: PartsOf[ConfigT]) -> None:
        """Makes the model's modules."""

    def map_weight(self, name: str, values: torch.Tensor) -> None:
        """Takes a tensor whose slot is on the meta device, as it lies in its file."""
        raise AssertionError(f"{name} is no such tensor")

    @abstractmethod
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Runs one step of a flattened batch.

        Args:
            token_ids: int64 [T]; T may be 0.
            positions: int64 [T].
            meta: Index tables of the step.
            kv_caches: Cache name -> [num_blocks, rows_per_block, width], the last axis contiguous.

        Returns:
            The streams after the last layer, of which ``compute_logits`` takes any rows.

        Mutates:
            kv_caches.
        """

    @abstractmethod
    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps any rows of the streams to what the output matrix reads of them [M, D]."""
