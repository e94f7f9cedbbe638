"""Routed experts beside a layer's gated MLP, both over the residual stream (Gemma 4).

MLP's output  --- norm 1 -----------------------------------.
stream ---------- norm before 2 --- experts --- norm 2 ---- + --> normed once more by the block
       \\-------- norm without weight * scale / sqrt(D) --- router: a softmax over all, the best
                 k scaled to a sum of one, each times its expert's own scale
"""

import math

import torch

from vllm.model_executor.models.decoder.config import ExpertsPlan
from vllm.model_executor.models.decoder.feed_forward import ExpertBank
from vllm.model_executor.models.decoder.step import ModelParts

_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)


class ExpertsBeside(ExpertBank):
    """The experts, their router and the norms around both parts.

    Args:
        plan: The experts.
        parts: What to build from, within the layer.
    """

    def __init__(self, plan: ExpertsPlan, parts: ModelParts) -> None:
        super().__init__(plan, parts)
        make, hidden = parts.make, parts.config.hidden_size
        self.norms = make.parameter(len(_NORMS), hidden)
        self.router_scale: torch.Tensor = make.parameter(hidden, dtype=torch.float32)
        self.expert_scales = make.parameter(plan.num_experts, dtype=torch.float32)
        self._eps = parts.config.norm.eps
        self._shrink = 1.0 / math.sqrt(hidden)
        self._norm = parts.ops("rms_norm")

    def router_norm(self) -> torch.Tensor:
        """Returns the weight of the norm before the router, fp32 [D]."""
        return self.router_scale * self._shrink

    def forward(self, mapped: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """Returns both parts' sum [T, D].

        Args:
            mapped: The MLP's output [T, D].
            stream: The residual stream before the MLP and its norm [T, D].
        """
        after_mlp, before, after = self.norms
        ids, weights = self.choose(self._norm(stream.float(), self.router_norm(), self._eps))
        routed = self.run(
            self._norm(stream, before, self._eps), ids, weights * self.expert_scales[ids]
        )
        total: torch.Tensor = self._norm(mapped, after_mlp, self._eps)
        total += self._norm(routed, after, self._eps)
        return total

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        norms = zip(_NORMS, self.norms.data, strict=True)
        return {
            **{f"{prefix}.{name}.weight": weight for name, weight in norms},
            f"{prefix}.router.proj.weight": self.router.data,
            f"{prefix}.router.scale": self.router_scale.data,
            f"{prefix}.router.per_expert_scale": self.expert_scales.data,
            **super().weight_slots(prefix),
        }
