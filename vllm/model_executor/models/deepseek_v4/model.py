"""DeepSeek-V4 for generation: one file set for all devices, ops asked for by name."""

from collections.abc import Mapping

import torch
from torch import nn

from vllm.model_executor.layers.hyper_connections import HyperHead
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v4.block import DeepseekV4Block
from vllm.model_executor.models.deepseek_v4.config import DeepseekV4Config
from vllm.model_executor.models.deepseek_v4.latent_model import LatentModel
from vllm.model_executor.models.deepseek_v4.mtp import DeepseekV4MTP
from vllm.v1.attention.step_tables import StepMetadata

_MTP = "mtp."


class DeepseekV4ForCausalLM(LatentModel[DeepseekV4Config]):
    """The main model, and the MTP block's weights if the checkpoint has one."""

    def _build(self, parts: PartsOf[DeepseekV4Config]) -> None:
        config, make, ops = parts.config, parts.make, parts.ops
        self._build_ends(parts)
        self.layers = nn.ModuleList(
            DeepseekV4Block(f"layers.{index}", plan, parts)
            for index, plan in enumerate(config.layers)
        )
        self.hc_head = HyperHead(
            config.hc_mult, config.hidden_size, config.rms_norm_eps, config.hc_eps, ops, make
        )
        # Of a block that the checkpoint lacks, a release's size, nothing is allocated.
        has_mtp = config.num_nextn_predict_layers and (
            make.quantization is None or make.quantization.has_part(_MTP)
        )
        self.mtp = DeepseekV4MTP(parts) if has_mtp else None

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
        return self._map_to_logits(self.hc_head(streams))

    def norm_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Collapses the streams [M, n, D] to what the output matrix reads [M, D]."""
        return self._norm_collapsed(self.hc_head(streams))

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
        slots = {**self._end_slots(), **self.hc_head.weight_slots("hc_head")}
        for layer in self.layers:
            assert isinstance(layer, DeepseekV4Block)
            slots.update(layer.weight_slots())
        if self.mtp is not None:
            slots.update(self.mtp.weight_slots())
        return slots

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent: transformers drops the MTP block on save."""
        return (_MTP,)

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of checkpoint tensors that have no slot on purpose."""
        return (*(() if self.mtp is not None else (_MTP,)), *self._ignored_head)
