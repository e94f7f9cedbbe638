"""What a table knows of the last tokens, added to the residual streams where they agree with it."""

import torch
from torch import nn

from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.causal_lm import PartsOf
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config

_LEAST_AGREEMENT = 1e-6


class Engram(nn.Module):
    """One layer's: from the rows of its table, a value, and for each stream a key that gates it.

    Args:
        prefix: Published prefix of its tensors, such as "layers.1.engram".
        parts: What to build from.
    """

    def __init__(self, prefix: str, parts: PartsOf[DeepseekV41Config]) -> None:
        super().__init__()
        config, make = parts.config, parts.make.within(prefix)
        assert config.ngrams is not None, "the model has tables"
        self._prefix = prefix
        self._num_streams, self._eps = config.hc_mult, config.rms_norm_eps
        self._dtype = make.dtype
        num_values = config.ngrams.rows_per_token * config.ngrams.row_width
        self.wkv = ReplicatedLinear(
            num_values, ((config.hc_mult + 1) * config.hidden_size,), make, ("wkv",)
        )
        shape = (config.hc_mult, config.hidden_size)
        self.q_weight = make.parameter(*shape, dtype=torch.float32)
        self.k_weight = make.parameter(*shape, dtype=torch.float32)
        self._rms_norm = parts.ops("rms_norm")

    def forward(
        self, streams: torch.Tensor, rows: torch.Tensor, is_image: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the new streams [T, n, D].

        Args:
            streams: [T, n, D].
            rows: fp32 [T * R, width]: the rows of each token's n-grams, in order.
            is_image: bool [T]: tokens that get nothing; None: all get some.
        """
        num_tokens, width = len(streams), streams.shape[2]
        mixed = self.wkv(rows.view(num_tokens, -1).to(self._dtype)).float()
        mixed = mixed.view(num_tokens, self._num_streams + 1, width)
        keys, values = mixed[:, :-1], mixed[:, -1:]
        queries = self._rms_norm(streams.float(), None, self._eps) * self.q_weight
        keys = self._rms_norm(keys, None, self._eps) * self.k_weight
        agreement = (queries * keys).sum(-1, keepdim=True) * width**-0.5
        # A square root of either sign.
        root = agreement.abs().clamp_(min=_LEAST_AGREEMENT).sqrt_()
        gates = torch.sigmoid(torch.sign(agreement) * root)
        if is_image is not None:
            gates = gates.masked_fill(is_image.view(-1, 1, 1), 0.0)
        added: torch.Tensor = streams + (gates * values).to(streams.dtype)
        return added

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination, but for the table's."""
        return {
            **self.wkv.part_slots(0, f"{self._prefix}.wkv"),
            f"{self._prefix}.q_weight": self.q_weight.data,
            f"{self._prefix}.k_weight": self.k_weight.data,
        }
