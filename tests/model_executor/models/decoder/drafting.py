"""Tiny models with blocks that draft, and transformers' layers as the blocks' oracles."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.models.decoder.building import build_model
from tests.model_executor.models.decoder.checkpoints import VOCAB_SIZE, write_model
from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    deepseek_v32,
    glm5_next,
    glm_moe_dsa,
    published_tensors,
    qwen3_5,
)
from tests.model_executor.models.decoder.test_gated_delta import OTHERS
from tests.model_executor.models.harness import PagedHarness
from tests.tokenizers.family_tokenizers import byte_level
from vllm.model_executor.models.decoder.kv_cache import drafter_cache_names
from vllm.model_executor.models.decoder.model import DecoderForCausalLM
from vllm.v1.attention.metadata import BlockTableView, RequestSlice

# Sums of layers are scaled by this: the next token then follows from the last one for the most
# part, so that a block which passes its embedding on is right often, and wrong often.
_QUIET = 0.05
_SUMMED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")


def build_quiet_model(raw: dict[str, Any], seed: int) -> Any:
    """Builds transformers' model, its layers' outputs scaled down."""
    model = build_hf_model(raw, seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(_SUMMED):
                tensor.mul_(_QUIET)
    return model


def block_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns a model of one layer of attention, as the block's."""
    return {**raw, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


def draw_projection(width: int, generator: torch.Generator) -> torch.Tensor:
    """Returns what a block joins a token and an output by, [D, 2 * D]: mostly the token."""
    fc = torch.cat([torch.eye(width), 0.1 * torch.eye(width)], 1)
    return fc + 0.02 * torch.randn(fc.shape, generator=generator)


def find_hidden(target: Any, token_ids: list[int]) -> torch.Tensor:
    """Returns a model's normed output [T, D]."""
    with torch.inference_mode():
        tokens = torch.tensor([token_ids])
        found: torch.Tensor = target.model(tokens, use_cache=False).last_hidden_state[0]
    return found


class BlockOracle:
    """The block, out of transformers' parts.

    Args:
        raw: The model's config.json.
        target: transformers' model.
        seed: Of the block's weights.
    """

    def __init__(self, raw: dict[str, Any], target: Any, seed: int) -> None:
        self._target = target
        self._model = build_quiet_model(block_config(raw), seed)
        width = raw["hidden_size"]
        generator = torch.Generator().manual_seed(seed)
        self._fc = draw_projection(width, generator)
        self._norms = 0.1 * torch.randn(2, width, generator=generator)
        self._eps = raw["rms_norm_eps"]
        with torch.no_grad():
            head = self._model.get_output_embeddings().weight
            head.copy_(target.get_output_embeddings().weight)
            self._model.model.norm.weight.copy_(target.model.norm.weight)
        self.norm: torch.Tensor = self._model.model.norm.weight

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """Returns the model's normed output [T, D]."""
        return find_hidden(self._target, token_ids)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the block's tensors as releases name them."""
        found = {
            "mtp.fc.weight": self._fc,
            "mtp.pre_fc_norm_embedding.weight": self._norms[0].clone(),
            "mtp.pre_fc_norm_hidden.weight": self._norms[1].clone(),
        }
        for name, tensor in self._model.state_dict().items():
            if name.startswith("model.layers.0."):
                found["mtp." + name.removeprefix("model.")] = tensor
        found["mtp.norm.weight"] = self._model.model.norm.weight.data
        return found

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns logits [T - 1, V]: row t guesses the token at t + 2."""
        hidden = self.hidden(token_ids)[:-1]
        with torch.inference_mode():
            embedded = self._target.get_input_embeddings()(torch.tensor(token_ids[1:]))
            joined = torch.cat([self._norm(embedded, 0), self._norm(hidden, 1)], -1)
            x = joined @ self._fc.T
            logits: torch.Tensor = self._model(inputs_embeds=x[None], use_cache=False).logits[0]
        return logits

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return x * scale * (1 + self._norms[index])


class DeepseekBlockOracle:
    """The block of a DeepSeek V3.2 or a GLM 5, out of transformers' parts.

    Args:
        raw: The model's config.json.
        target: transformers' model.
        seed: Of the block's weights.
    """

    def __init__(self, raw: dict[str, Any], target: Any, seed: int) -> None:
        self._target, self._raw = target, raw
        # The block has experts, as the layers behind the first.
        own = {**raw, "num_hidden_layers": 1, "first_k_dense_replace": 0, "indexer_types": ["full"]}
        self._model = build_quiet_model(own, seed)
        width = raw["hidden_size"]
        generator = torch.Generator().manual_seed(seed)
        self._fc = draw_projection(width, generator)
        self._norms = 1 + 0.1 * torch.randn(2, width, generator=generator)
        with torch.no_grad():
            self._model.lm_head.weight.copy_(target.lm_head.weight)
            self._model.model.norm.weight.copy_(target.model.norm.weight)
        self.norm: torch.Tensor = self._model.model.norm.weight

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the block's tensors as releases name them."""
        first, own = "model.layers.0.", f"model.layers.{self._raw['num_hidden_layers']}."
        found = {
            own + name.removeprefix(first): tensor
            for name, tensor in published_tensors(self._model).items()
            if name.startswith(first)
        }
        found[f"{own}eh_proj.weight"] = self._fc
        found[f"{own}enorm.weight"], found[f"{own}hnorm.weight"] = map(torch.clone, self._norms)
        found[f"{own}shared_head.norm.weight"] = self.norm.data
        return found

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """Returns the model's normed output [T, D]."""
        return find_hidden(self._target, token_ids)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns logits [T - 1, V]: row t guesses the token at t + 2."""
        hidden = self.hidden(token_ids)[:-1]
        with torch.inference_mode():
            embedded = self._target.get_input_embeddings()(torch.tensor(token_ids[1:]))
            embedded[0] = 0.0
            joined = torch.cat([self._norm(embedded, 0), self._norm(hidden, 1)], -1)
            x = joined @ self._fc.T
            logits: torch.Tensor = self._model(inputs_embeds=x[None], use_cache=False).logits[0]
        return logits

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._raw["rms_norm_eps"]).rsqrt()
        return x * scale * self._norms[index]


class GlmBlockOracle:
    """The block of a GLM 5.3, out of the last layer of transformers' model, without streams.

    Args:
        raw: The model's config.json; its last layer attends, and has experts.
        target: transformers' model.
        seed: Of the block's weights.
    """

    def __init__(self, raw: dict[str, Any], target: Any, seed: int) -> None:
        self._target, self._text = target, raw["text_config"]
        self._model = build_quiet_model(raw, seed)
        self._layer = self._model.model.language_model.layers[-1]
        width = self._text["hidden_size"]
        generator = torch.Generator().manual_seed(seed)
        self._fc = draw_projection(width, generator)
        self._norms = 1 + 0.1 * torch.randn(3, width, generator=generator)
        with torch.no_grad():
            self._norms[2] = target.model.language_model.norm.weight
        self.norm = self._norms[2]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the block's tensors as releases name them."""
        count = self._text["num_hidden_layers"]
        last = f"model.language_model.layers.{count - 1}."
        own = f"model.language_model.layers.{count}."
        found = {
            own + name.removeprefix(last): tensor
            for name, tensor in published_tensors(self._model).items()
            if name.startswith(last) and ".hc_" not in name
        }
        found[f"{own}eh_proj.weight"] = self._fc
        names = ("enorm", "hnorm", "shared_head.norm")
        return found | {
            f"{own}{name}.weight": norm.clone()
            for name, norm in zip(names, self._norms, strict=True)
        }

    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """Returns the model's normed output [T, D]."""
        return find_hidden(self._target, token_ids)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns logits [T - 1, V]: row t guesses the token at t + 2."""
        hidden, layer = self.hidden(token_ids)[:-1], self._layer
        with torch.inference_mode():
            embedded = self._target.get_input_embeddings()(torch.tensor(token_ids[1:]))
            embedded[0] = 0.0
            joined = torch.cat([self._norm(embedded, 0), self._norm(hidden, 1)], -1)
            x = (joined @ self._fc.T)[None]
            mask = torch.ones(1, x.shape[1], dtype=torch.bool)
            x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), attention_mask=mask)[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            head = self._target.get_output_embeddings().weight
            return self._norm(x[0], 2) @ head.T

    def _norm(self, x: torch.Tensor, index: int) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._text["rms_norm_eps"]).rsqrt()
        return x * scale * self._norms[index]


def add_block(folder: Path, oracle: "Oracle") -> None:
    """Puts a block into a checkpoint that transformers saved."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    own = {name: tensor.contiguous().clone() for name, tensor in oracle.tensors().items()}
    save_file(tensors | own, path, {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_num_hidden_layers": 1}))


Oracle = BlockOracle | DeepseekBlockOracle | GlmBlockOracle

DRAFTING_MODELS: dict[str, tuple[dict[str, Any], type[Oracle]]] = {
    "qwen 3.5": (qwen3_5(vocab_size=VOCAB_SIZE), BlockOracle),
    # Of more than 36 tokens a part is chosen.
    "glm": (glm5_next(vocab_size=VOCAB_SIZE, index_topk=32), GlmBlockOracle),
    "glm 5": (glm_moe_dsa(vocab_size=VOCAB_SIZE), DeepseekBlockOracle),
}


MORE_MODELS: dict[str, tuple[dict[str, Any], type[Oracle]]] = {
    "deepseek v3.2": (deepseek_v32(vocab_size=VOCAB_SIZE), DeepseekBlockOracle),
    **{name: ({**raw, "vocab_size": VOCAB_SIZE}, BlockOracle) for name, raw in OTHERS.items()},
}


def write_drafting_model(name: str, folder: Path, **overrides: Any) -> Any:
    """Writes the checkpoint of one of these with its block; returns transformers' model.

    ``overrides`` are of its text part.
    """
    raw, oracle = (DRAFTING_MODELS | MORE_MODELS)[name]
    raw = (
        {**raw, "text_config": {**raw["text_config"], **overrides}}
        if "text_config" in raw
        else {**raw, **overrides}
    )
    write_model(raw, folder, byte_level())
    target = build_quiet_model(raw, 7)
    target.save_pretrained(folder)
    add_block(folder, oracle(raw, target, 11))
    return target


def build_block_model(
    raw: dict[str, Any], oracle: type[Oracle], dtype: torch.dtype = torch.float32
) -> tuple[DecoderForCausalLM, Oracle]:
    """Returns our model of a config.json with its block, and the block's oracle."""
    target = build_quiet_model(raw, 7)
    block = oracle(raw, target, 11)
    # Else the block's last norm is the model's, and either would do for the other.
    block.norm.data += 0.1 * torch.randn(block.norm.shape, generator=torch.Generator())
    tensors = {**published_tensors(target), **block.tensors()}
    own = raw | {"mtp_num_hidden_layers": 1}
    return build_model(own, tensors, dtype, drafts=True), block


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of one request for the block.

    Attributes:
        request: Which; its blocks are its own.
        start: The first one's position.
        streams: [T, D]: normed streams of the target.
        next_ids: The tokens behind them.
    """

    request: int
    start: int
    streams: torch.Tensor
    next_ids: Sequence[int]


class BlockRunner:
    """Runs the block of a harness' model alone, over the pages of its own caches.

    Args:
        harness: The model's.
        max_blocks: Of a request, in each of the block's caches.
    """

    def __init__(self, harness: PagedHarness, max_blocks: int) -> None:
        self._harness, self._max_blocks = harness, max_blocks
        names = drafter_cache_names(harness.model.config)
        groups = tuple(harness.layout.groups[harness.layout.group_of[name]] for name in names)
        group_of = {name: index for index, name in enumerate(names)}
        self._layout = replace(harness.layout, groups=groups, group_of=group_of)

    def run(self, batch: Sequence[BlockRows]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the block's outputs [T, D] and logits [T, V] of every request's rows."""
        steps, counts = self._harness.steps, [len(rows.next_ids) for rows in batch]
        positions = [torch.arange(r.start, r.start + len(r.next_ids)) for r in batch]
        with torch.inference_mode():
            outputs = steps.model.forward_mtp(
                torch.cat([rows.streams for rows in batch]),
                torch.tensor([token for rows in batch for token in rows.next_ids]),
                torch.cat(positions),
                steps.build_metadata([self._slice(rows) for rows in batch], self._layout),
                self._harness.kv_caches,
            )
            logits = steps.model.compute_mtp_logits(outputs)
        return list(outputs.split(counts)), list(logits.split(counts))

    def _slice(self, rows: BlockRows) -> RequestSlice:
        first = 1 + rows.request * self._max_blocks
        table = BlockTableView(0, np.arange(first, first + self._max_blocks))
        return RequestSlice(rows.start, len(rows.next_ids), (table,) * len(self._layout.groups))
