"""DeepSeek-V4 for generation: one file set for all devices, ops asked for by name."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from vllm.model_executor.layers.hyper_connections import HyperHead
from vllm.model_executor.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_names import TensorPart, published_parts
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.deepseek_v4.block import DeepseekV4Block
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.mtp import DeepseekV4MTP
from vllm.model_executor.models.deepseek_v4.step import ModelParts, StepFactory
from vllm.v1.attention.step_tables import StepMetadata

_MTP = "mtp."
_EMBEDDING, _HEAD = "embed", "head"


class DeepseekV4ForCausalLM(CausalLM[DeepseekV4Config]):
    """The main model, and the MTP block's weights if the checkpoint has one.

    Hyper-connections, router, sinks, compressor state and the output head stay fp32.
    """

    def _build(self, parts: ModelParts) -> None:
        config, make, ops = parts.config, parts.make, parts.ops
        self.embed = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, make, matrix_name=_EMBEDDING
        )
        self.layers = nn.ModuleList(
            DeepseekV4Block(f"layers.{index}", plan, parts)
            for index, plan in enumerate(config.layers)
        )
        self.hc_head = HyperHead(
            config.hc_mult, config.hidden_size, config.rms_norm_eps, config.hc_eps, ops, make
        )
        self.norm = make.parameter(config.hidden_size)
        self.head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            make,
            self.embed if config.tie_word_embeddings else None,
            matrix_name=_HEAD,
        )
        # Of a block that the checkpoint lacks, a release's size, nothing is allocated.
        has_mtp = config.num_nextn_predict_layers and (
            make.quantization is None or make.quantization.has_part(_MTP)
        )
        self.mtp = DeepseekV4MTP(parts) if has_mtp else None
        self.frequencies = StepFactory(parts)
        self._rms_norm = ops("rms_norm")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Returns residual streams [T, n, D] after the last layer, before the collapse."""
        embedded: torch.Tensor = self.embed(token_ids)
        streams = embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        if not meta.num_tokens:
            return streams
        step = self.frequencies(token_ids, positions, meta, kv_caches)
        for layer in self.layers:
            streams = layer(streams, step)
        return streams

    def compute_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps the streams [M, n, D] of any chosen rows to fp32 logits [M, V]."""
        hidden = self._rms_norm(self.hc_head(streams), self.norm, self.config.rms_norm_eps)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def forward_mtp(
        self,
        streams: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: StepMetadata,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Runs the MTP block at positions t of a flattened batch.

        Args:
            streams: [T, n, D] at t: what ``forward`` returned, or this method for later drafts.
            next_token_ids: int64 [T]: the tokens at t + 1.
            positions: int64 [T]: t.
            meta: Index tables of the step.
            kv_caches: As in ``forward``.

        Returns:
            The block's streams [T, n, D]; ``compute_mtp_logits`` predicts t + 2 from them.
        """
        assert self.mtp is not None, "the checkpoint has no MTP block"
        step = self.frequencies(next_token_ids, positions, meta, kv_caches)
        drafted: torch.Tensor = self.mtp(streams, self.embed(next_token_ids), step)
        return drafted

    def compute_mtp_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps the MTP block's streams [M, n, D] to fp32 logits [M, V]."""
        assert self.mtp is not None, "the checkpoint has no MTP block"
        logits: torch.Tensor = self.head(self.mtp.collapse(streams))
        return logits

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination view, ``mtp.0.*`` included.

        Experts are slices of stacked parameters. A tied head has no slot of its own.
        """
        slots = {
            **self.embed.weight_slots(_EMBEDDING),
            "norm.weight": self.norm.data,
            **self.hc_head.weight_slots("hc_head"),
        }
        if not self.config.tie_word_embeddings:
            slots |= self.head.weight_slots(_HEAD)
        for layer in self.layers:
            assert isinstance(layer, DeepseekV4Block)
            slots.update(layer.weight_slots())
        if self.mtp is not None:
            slots.update(self.mtp.weight_slots())
        return slots

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """Returns which slots a stored tensor of some name and shape fills."""
        return published_parts(name, shape)

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent: transformers drops the MTP block on save."""
        return (_MTP,)

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of checkpoint tensors that have no slot on purpose."""
        ignored = () if self.mtp is not None else (_MTP,)
        return (*ignored, "head.") if self.config.tie_word_embeddings else ignored
