"""Gemma 4's assistant: a small checkpoint that drafts from its target's keys and values.

It has queries alone. Each of its layers attends to what the target stored last for its kind: the
rows of the last window layer, and of the last full layer, that have a cache. For one draft

    x = W_in [ target's embedding of the last token | target's hidden state before that token ]

runs through the layers at the last token's position, whatever the draft's depth; the head gives the
draft, and W_out the hidden state that stands for the target's at the next one. What it reads is the
target's, so it keeps nothing and a prefix hit costs it nothing. A head by clusters scores only the
tokens of those whose centroids fit best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, softmax

from vllm.exceptions import ConfigError
from vllm.model_executor.layers.rotary import compute_half_turns
from vllm.model_executor.model_loader.weight_names import TensorPart
from vllm.model_executor.models.config_fields import FieldReader
from vllm.model_executor.models.decoder.config import (
    AttentionShape,
    DecoderConfig,
    LayerPlan,
    MlpPlan,
)
from vllm.model_executor.models.decoder.step import find_frequencies
from vllm.model_executor.models.gemma4 import read_assistant_layers
from vllm.v1.attention.ops.decoder import gelu_tanh_and_mul, rotate_halves
from vllm.v1.attention.ops.reference import rms_norm

_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """One assistant.

    Attributes:
        vocab_size, hidden_size: Its own; the vocabulary is the target's.
        target_size: Width of the target's hidden state.
        layers: Windows, heads and rotary settings; keys and values are the target's.
        eps: Of its norms.
        num_centroids: Clusters of the vocabulary; 0: every token is scored.
        num_chosen: Clusters that are scored.
    """

    vocab_size: int
    hidden_size: int
    target_size: int
    layers: tuple[LayerPlan, ...]
    eps: float
    num_centroids: int
    num_chosen: int


def read_assistant(raw: Mapping[str, Any]) -> AssistantConfig:
    """Reads the config.json of a Gemma4AssistantForCausalLM.

    Raises:
        ConfigError: A field is missing, of the wrong type, or not one we serve.
    """
    fields = FieldReader(raw)
    fields.require("model_type", None, _MODEL_TYPES)
    if not fields.has("text_config"):
        raise ConfigError("config.json of the assistant lacks 'text_config'")
    text = fields.sub_reader("text_config")
    vocab_size = text.positive_int("vocab_size", 262_144)
    has_clusters = fields.boolean("use_ordered_embeddings", False)
    num_centroids = fields.positive_int("num_centroids", 2048) if has_clusters else 0
    num_chosen = fields.positive_int("centroid_intermediate_top_k", 32)
    if has_clusters and (vocab_size % num_centroids or num_chosen > num_centroids):
        allowed = f"a divisor of vocab_size ({vocab_size}), at least the {num_chosen} chosen"
        raise fields.error("num_centroids", num_centroids, allowed)
    return AssistantConfig(
        vocab_size=vocab_size,
        hidden_size=text.positive_int("hidden_size", 2304),
        target_size=fields.positive_int("backbone_hidden_size", 1536),
        layers=read_assistant_layers(text),
        eps=text.number("rms_norm_eps", 1e-6),
        num_centroids=num_centroids,
        num_chosen=num_chosen,
    )


def find_owners(assistant: AssistantConfig, target: DecoderConfig) -> tuple[int, ...]:
    """Returns for each of the assistant's layers whose rows it reads.

    Raises:
        ConfigError: The two do not fit together; the message names what differs.
    """
    if assistant.vocab_size != target.vocab_size or assistant.target_size != target.hidden_size:
        raise ConfigError(
            f"the assistant is one for a vocabulary of {assistant.vocab_size} and a hidden size of "
            f"{assistant.target_size}, but the model has {target.vocab_size} and "
            f"{target.hidden_size}: use the assistant of the same release."
        )
    last = {
        layer.window: index for index, layer in enumerate(target.layers) if layer.kv_owner is None
    }
    owners = []
    for index, layer in enumerate(assistant.layers):
        owner = last.get(layer.window)
        shape = None if owner is None else target.shape_of(target.layers[owner])
        own = layer.attention
        assert own is not None, "every layer has its heads"
        if owner is None or shape is None or shape.head_dim != own.head_dim:
            raise ConfigError(
                f"layer {index} of the assistant (a window of {layer.window or 'all'} tokens, "
                f"heads of {own.head_dim}) finds no keys of that kind in the model: use the "
                "assistant of the same release."
            )
        if own.num_heads % shape.num_kv_heads:
            raise ConfigError(
                f"layer {index} of the assistant has {own.num_heads} query heads, which the "
                f"model's {shape.num_kv_heads} key heads do not divide"
            )
        owners.append(owner)
    return tuple(owners)


class AssistantLayer(nn.Module):
    """Queries over given keys and values, then a gated MLP.

    Args:
        plan: The layer.
        config: The assistant.
        dtype: Of its weights.
    """

    def __init__(self, plan: LayerPlan, config: AssistantConfig, dtype: torch.dtype) -> None:
        super().__init__()
        shape, mlp = plan.attention, plan.feed_forward
        assert isinstance(shape, AttentionShape)
        assert isinstance(mlp, MlpPlan)
        hidden, width = config.hidden_size, shape.num_heads * shape.head_dim
        self.shape, self.rope, self._eps = shape, plan.rope, config.eps
        self.slots: dict[str, torch.Tensor] = {
            "self_attn.q_proj.weight": torch.empty(width, hidden, dtype=dtype),
            "self_attn.q_norm.weight": torch.empty(shape.head_dim, dtype=dtype),
            "self_attn.o_proj.weight": torch.empty(hidden, width, dtype=dtype),
            "mlp.gate_proj.weight": torch.empty(mlp.inner_size, hidden, dtype=dtype),
            "mlp.up_proj.weight": torch.empty(mlp.inner_size, hidden, dtype=dtype),
            "mlp.down_proj.weight": torch.empty(hidden, mlp.inner_size, dtype=dtype),
            "layer_scalar": torch.empty(1, dtype=dtype),
            **{f"{name}.weight": torch.empty(hidden, dtype=dtype) for name in _NORMS},
        }

    def forward(
        self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor] | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """Maps one row [1, d] to [1, d], over stored rows [L, 2 * K * head_dim]."""
        slots, eps, shape = self.slots, self._eps, self.shape
        normed = [slots[f"{name}.weight"] for name in _NORMS]
        queries = linear(rms_norm(x, normed[0], eps), slots["self_attn.q_proj.weight"])
        queries = queries.view(1, shape.num_heads, shape.head_dim)
        queries = rms_norm(queries, slots["self_attn.q_norm.weight"], eps)
        if turns is not None:
            queries = rotate_halves(queries, *turns)
        keys, values = rows.view(len(rows), 2, -1, shape.head_dim).unbind(1)
        by_head = queries.view(keys.shape[1], -1, shape.head_dim)
        scores = torch.einsum("kgd,lkd->kgl", by_head.float(), keys.float()) * shape.scale
        mixed = torch.einsum("kgl,lkd->kgd", softmax(scores, -1), values.float())
        attended = linear(mixed.reshape(1, -1).to(x.dtype), slots["self_attn.o_proj.weight"])
        x = x + rms_norm(attended, normed[1], eps)
        inner = rms_norm(x, normed[2], eps)
        gate_up = torch.cat(
            [linear(inner, slots[f"mlp.{name}_proj.weight"]) for name in ("gate", "up")], -1
        )
        mapped = linear(gelu_tanh_and_mul(gate_up), slots["mlp.down_proj.weight"])
        return (x + rms_norm(mapped, normed[3], eps)) * slots["layer_scalar"]


class Gemma4Assistant(nn.Module):
    """The assistant, on the target's device and in its type; filled by the loader."""

    def __init__(self, config: AssistantConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(AssistantLayer(plan, config, dtype) for plan in config.layers)
        ropes = {plan.rope for plan in config.layers if plan.rope is not None}
        self._frequencies = {rope: find_frequencies(rope, torch.device("cpu")) for rope in ropes}
        self._dtype = dtype
        hidden, target = config.hidden_size, config.target_size
        self._slots: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": torch.empty(config.vocab_size, hidden, dtype=dtype),
            "model.norm.weight": torch.empty(hidden, dtype=dtype),
            "pre_projection.weight": torch.empty(hidden, 2 * target, dtype=dtype),
            "post_projection.weight": torch.empty(target, hidden, dtype=dtype),
        }
        if config.num_centroids:
            self._slots["masked_embedding.centroids.weight"] = torch.empty(
                config.num_centroids, hidden, dtype=dtype
            )
            self._slots["masked_embedding.token_ordering"] = torch.empty(
                config.vocab_size, dtype=torch.int64
            )

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        position: int,
        rows: Sequence[torch.Tensor],
    ) -> tuple[int, torch.Tensor]:
        """Drafts one token.

        Args:
            embedded: The target's scaled embedding of the last token [1, D].
            hidden: The target's normed hidden state before it [1, D], or what stood for it.
            position: The last known token's.
            rows: By layer, the stored rows that it reads [L, 2 * K * head_dim].

        Returns:
            The draft, and what stands for the target's hidden state at it [1, D].
        """
        x = linear(
            torch.cat([embedded, hidden], -1).to(self._dtype), self._slots["pre_projection.weight"]
        )
        at = torch.tensor([position])
        turns = {
            rope: compute_half_turns(at, frequencies, rope.magnitude, self._dtype)
            for rope, frequencies in self._frequencies.items()
        }
        for layer, own in zip(self.layers, rows, strict=True):
            assert isinstance(layer, AssistantLayer)
            x = layer(x, None if layer.rope is None else turns[layer.rope], own)
        x = rms_norm(x, self._slots["model.norm.weight"], self.config.eps)
        return self._choose(x), linear(x, self._slots["post_projection.weight"])

    def _choose(self, x: torch.Tensor) -> int:
        head = self._slots["model.embed_tokens.weight"]
        if not self.config.num_centroids:
            return int(linear(x, head).argmax())
        fits = linear(x, self._slots["masked_embedding.centroids.weight"])[0]
        clusters = fits.topk(self.config.num_chosen).indices
        ordering = self._slots["masked_embedding.token_ordering"]
        tokens = ordering.view(self.config.num_centroids, -1)[clusters].flatten()
        return int(tokens[linear(x, head[tokens]).argmax()])

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Returns tensor name -> destination."""
        slots = dict(self._slots)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, AssistantLayer)
            slots |= {f"model.layers.{index}.{name}": own for name, own in layer.slots.items()}
        return slots

    def map_weight(self, name: str, values: torch.Tensor) -> None:
        """Never asked: every slot has memory."""
        raise AssertionError(name)

    def tensor_parts(self, name: str, shape: Sequence[int]) -> tuple[TensorPart, ...]:
        """Returns the slot of a stored tensor: that of its name."""
        return (TensorPart(name),)

    @property
    def optional_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes whose tensors may all be absent: none."""
        return ()

    @property
    def ignored_weight_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensors without a slot: the head is the embedding."""
        return ("lm_head.",)
