"""DeepSeek-V4's experts: routed by score or by token id, plus one shared expert."""

import torch
from torch import nn

from vllm.distributed.parallel_state import shard_size
from vllm.model_executor.layers.quantization import QuantisedExperts
from vllm.model_executor.layers.quantization.products import multiply_plain
from vllm.model_executor.models.deepseek_v4.spread_experts import SpreadExperts
from vllm.model_executor.models.deepseek_v4.step import ModelParts, Step


class DeepseekV4MoE(nn.Module):
    """The feed-forward sublayer of one block.

    Args:
        hash_routed: Look the experts up by token id; else choose the best-scored ones.
        parts: What to build from.
    """

    def __init__(self, hash_routed: bool, parts: ModelParts) -> None:
        super().__init__()
        config, make = parts.config, parts.make
        self._group = make.group
        self._num_experts = config.n_routed_experts
        self._num_chosen = config.num_experts_per_tok
        self._factor, self._limit = config.routed_scaling_factor, config.swiglu_limit
        inner = shard_size("moe_intermediate_size", config.moe_intermediate_size, make.group)
        self._spread = SpreadExperts(parts) if make.share.spreads_experts else None
        self.quantised: QuantisedExperts | None = None
        if self._spread is None:
            self.quantised = make.quantised_experts(
                self._num_experts, config.hidden_size, inner, config.swiglu_limit
            )
        # The shared expert is as wide as a routed one and stands last in the stacks.
        is_stacked = self._spread is None and self.quantised is None
        num_plain = self._num_experts + 1 if is_stacked else 0
        self.gate_up = make.parameter(num_plain, 2 * inner, config.hidden_size)
        self.down = make.parameter(num_plain, config.hidden_size, inner)
        self.gate = make.parameter(
            self._num_experts,
            config.hidden_size,
            dtype=make.kept_dtype(torch.float32, "gate.weight"),
        )
        self.bias: nn.Parameter | None = None
        self.expert_of_token: nn.Parameter | None = None
        if hash_routed:
            self.expert_of_token = make.parameter(
                config.vocab_size, self._num_chosen, dtype=torch.int64
            )
        else:
            self.bias = make.parameter(self._num_experts, dtype=torch.float32)
        self._router_logits = parts.ops("router_logits")
        self._stored_linear = parts.ops("stored_linear")
        self._router_scores = parts.ops("router_scores")
        self._choose = parts.ops("choose_experts")
        self._weigh = parts.ops("expert_weights")
        self._mix = parts.ops("mix_experts")

    @property
    def is_one_product(self) -> bool:
        """Whether all experts are multiplied at once, whichever were chosen."""
        if self._spread is not None:
            return False
        return self.quantised is None or self.quantised.is_one_product

    def stack_stored(self) -> None:
        """Moves quantised experts into stacks that a kernel takes as one, if they are alike."""
        if self.quantised is not None:
            self.quantised.stack()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Maps the normed input [T, D] to [T, D]."""
        logits = multiply_plain(x.float(), self.gate, self._router_logits, self._stored_linear)
        scores = self._router_scores(logits)
        if self.expert_of_token is not None:
            expert_ids = self.expert_of_token[step.token_ids]
        else:
            expert_ids = self._choose(scores, self.bias, self._num_chosen)
        weights = self._weigh(scores, expert_ids, self._factor)
        if self._spread is not None:
            return self._group.all_reduce(self._spread(x, expert_ids, weights))
        if self.quantised is not None:
            return self._group.all_reduce(self.quantised(x, expert_ids, weights))
        mixed = self._mix(x, self.gate_up, self.down, expert_ids, weights, self._limit)
        return self._group.all_reduce(mixed)

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        """Returns published tensor name -> destination; experts are slices of the stacks."""
        slots = {f"{prefix}.gate.weight": self.gate.data}
        if self.expert_of_token is not None:
            slots[f"{prefix}.gate.tid2eid"] = self.expert_of_token.data
        if self.bias is not None:
            slots[f"{prefix}.gate.bias"] = self.bias.data
        if self._spread is not None:
            return slots | self._spread.weight_slots(prefix)
        if self.quantised is not None:
            return slots | self.quantised.slots(prefix)
        for expert in range(self._num_experts + 1):
            is_shared = expert == self._num_experts
            name = f"{prefix}.shared_experts" if is_shared else f"{prefix}.experts.{expert}"
            w1, w3 = self.gate_up.data[expert].chunk(2)
            slots[f"{name}.w1.weight"] = w1
            slots[f"{name}.w3.weight"] = w3
            slots[f"{name}.w2.weight"] = self.down.data[expert]
        return slots
