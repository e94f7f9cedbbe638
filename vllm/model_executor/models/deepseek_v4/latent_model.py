"""What DeepSeek-V4 and V4.1 have around their layers."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from vllm.model_executor.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_names import TensorPart, published_parts
from vllm.model_executor.models.causal_lm import CausalLM, PartsOf
from vllm.model_executor.models.deepseek_v4.config import LatentConfig
from vllm.model_executor.models.deepseek_v4.step import StepFactory

ConfigT = TypeVar("ConfigT", bound=LatentConfig)

_EMBEDDING, _HEAD = "embed", "head"


class LatentModel(CausalLM[ConfigT]):
    """Embedding, last norm and output head, by their published names.

    Hyper-connections, router, sinks, compressor state and the output head stay fp32.
    """

    def _build_ends(self, parts: PartsOf[ConfigT]) -> None:
        config, make = parts.config, parts.make
        self.embed = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, make, matrix_name=_EMBEDDING
        )
        self.norm = make.parameter(config.hidden_size)
        self.head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            make,
            self.embed if config.tie_word_embeddings else None,
            matrix_name=_HEAD,
        )
        self.frequencies = StepFactory(parts)
        self._rms_norm = parts.ops("rms_norm")

    def _map_to_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps collapsed rows [M, D], not normed yet, to fp32 logits [M, V]."""
        logits: torch.Tensor = self.head(self._norm_collapsed(hidden))
        return logits

    def _norm_collapsed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps collapsed rows [M, D] to what the head reads of them."""
        normed: torch.Tensor = self._rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return normed

    def _end_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination; a tied head has no slot of its own."""
        slots = {**self.embed.weight_slots(_EMBEDDING), "norm.weight": self.norm.data}
        return slots if self._ties_head else {**slots, **self.head.weight_slots(_HEAD)}

    @property
    def _ties_head(self) -> bool:
        return self.config.tie_word_embeddings

    @property
    def _ignored_head(self) -> tuple[str, ...]:
        """Prefixes of a head's tensors that a model with a tied one has no slot for."""
        return (f"{_HEAD}.",) if self._ties_head else ()

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """Returns which slots a stored tensor of some name and shape fills."""
        return published_parts(name, shape)
