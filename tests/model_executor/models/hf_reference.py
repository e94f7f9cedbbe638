"""transformers' DeepSeek-V4 as a black-box oracle: configs, random weights, margins, copying.

Only tests use it. It runs in fp32, one sequence at a time, without padding.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DeepseekV4Config as HfConfig
from transformers import DeepseekV4ForCausalLM as HfModel

from tests.model_executor.models.tiny_config import tiny_config

_LEAVES = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.norm\.", "norm."),
    (r"^model\.layers\.", "layers."),
    (r"\.attn_hc\.", ".hc_attn_"),
    (r"\.ffn_hc\.", ".hc_ffn_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (
        r"\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)",
        r".indexer.compressor.\1",
    ),
    (r"\.compressor\.indexer\.scorer\.weights_proj", ".indexer.weights_proj"),
    (r"\.compressor\.indexer\.q_b_proj", ".indexer.wq_b"),
    (r"\.compressor\.kv_proj", ".compressor.wkv"),
    (r"\.compressor\.gate_proj", ".compressor.wgate"),
    (r"\.compressor\.position_bias", ".compressor.ape"),
    (r"\.compressor\.kv_norm", ".compressor.norm"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.q_a_proj", ".wq_a"),
    (r"\.q_a_norm", ".q_norm"),
    (r"\.q_b_proj", ".wq_b"),
    (r"\.attn\.kv_proj", ".attn.wkv"),
    (r"\.o_a_proj", ".wo_a"),
    (r"\.o_b_proj", ".wo_b"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.gate\.e_score_correction_bias", ".gate.bias"),
    (r"\.shared_experts\.gate_proj", ".shared_experts.w1"),
    (r"\.shared_experts\.up_proj", ".shared_experts.w3"),
    (r"\.shared_experts\.down_proj", ".shared_experts.w2"),
]


def published_tensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames a transformers state dict to the published names, experts unstacked."""
    tensors = {}
    for name, tensor in state.items():
        for pattern, replacement in _LEAVES:
            name = re.sub(pattern, replacement, name)
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            for expert, stacked in enumerate(tensor):
                w1, w3 = stacked.chunk(2)
                tensors[f"{prefix}.{expert}.w1.weight"] = w1
                tensors[f"{prefix}.{expert}.w3.weight"] = w3
        elif name.endswith(".experts.down_proj"):
            prefix = name.removesuffix(".down_proj")
            for expert, w2 in enumerate(tensor):
                tensors[f"{prefix}.{expert}.w2.weight"] = w2
        else:
            tensors[name] = tensor
    return tensors


YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}


def randomize_(tensors: dict[str, torch.Tensor], vocab_experts: int, seed: int) -> None:
    """Fills published tensors so that every one of them matters: no zeros, no ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            rows = torch.rand(tensor.shape[0], vocab_experts, generator=generator).argsort(-1)
            tensor.copy_(rows[:, : tensor.shape[1]])
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm.weight" in name:
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith("_scale"):
            tensor.copy_(0.7 + 0.2 * noise)
        elif name.endswith((".ape", ".attn_sink", "_base")):
            tensor.copy_(noise)
        elif name.endswith(".gate.bias"):
            tensor.copy_(0.2 * noise)
        elif name.startswith("embed"):
            tensor.copy_(noise)
        elif name.startswith("head"):
            tensor.copy_(noise * 2 * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(noise * 1.3 * tensor.shape[-1] ** -0.5)


def build_hf_model(raw: dict[str, Any], seed: int) -> HfModel:
    """Builds the reference with random weights from either config spelling."""
    raw = {key: value for key, value in raw.items() if key not in ("architectures",)}
    config = HfConfig(**raw)
    config._attn_implementation = "eager"
    model: HfModel = HfModel(config)
    model.train(False)
    with torch.no_grad():
        randomize_(published_tensors(model.state_dict()), raw["n_routed_experts"], seed)
    return model


def transformers_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the config as transformers writes it."""
    spelled: dict[str, Any] = json.loads(HfConfig(**raw).to_json_string())
    return spelled


@dataclass
class ReferenceRun:
    """One full forward of the reference.

    Attributes:
        logits: [T, V].
        margins: [T]: the least gap, at each position, between what the router, the indexer or
            the argmax chose and the next best.
    """

    logits: torch.Tensor
    margins: torch.Tensor


@dataclass
class _Margins:
    top_k: int
    rates: dict[str, int]
    worst: torch.Tensor
    handles: list[Any] = field(default_factory=list)

    def note(self, gaps: torch.Tensor) -> None:
        self.worst = torch.minimum(self.worst, gaps)


def run_reference(model: HfModel, token_ids: list[int]) -> ReferenceRun:
    """Runs the reference once, watching its routers and indexers through hooks."""
    config = model.config
    margins = _Margins(config.index_topk, {}, torch.full((len(token_ids),), float("inf")))
    _watch_routers(model, margins)
    _watch_indexers(model, margins)
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    finally:
        for handle in margins.handles:
            handle.remove()
    best = logits.topk(2, dim=-1).values
    margins.note(best[:, 0] - best[:, 1])
    return ReferenceRun(logits, margins.worst)


def _watch_routers(model: HfModel, margins: _Margins) -> None:
    num_chosen = model.config.num_experts_per_tok
    for name, module in model.named_modules():
        if not name.endswith("mlp.gate") or not hasattr(module, "e_score_correction_bias"):
            continue
        bias = module.e_score_correction_bias

        def hook(
            _module: Any, _inputs: Any, scores: torch.Tensor, bias: torch.Tensor = bias
        ) -> None:
            best = (scores + bias).topk(num_chosen + 1, dim=-1).values
            margins.note(best[:, -2] - best[:, -1])

        margins.handles.append(module.score_fn.register_forward_hook(hook))


def _watch_indexers(model: HfModel, margins: _Margins) -> None:
    top_k = model.config.index_topk
    rates = model.config.compress_rates
    assert rates is not None
    rate = rates["compressed_sparse_attention"]
    for name, module in model.named_modules():
        if not name.endswith("indexer.scorer"):
            continue

        def hook(_module: Any, _inputs: Any, scores: torch.Tensor) -> None:
            scores = scores[0]
            num_visible = (torch.arange(scores.shape[0]) + 1) // rate
            hidden = torch.arange(scores.shape[1]) >= num_visible[:, None]
            scores = scores.masked_fill(hidden, float("-inf"))
            if scores.shape[1] <= top_k:
                return
            best = scores.topk(top_k + 1, dim=-1).values
            gaps = best[:, -2] - best[:, -1]
            margins.note(torch.where(num_visible > top_k, gaps, torch.inf))

        margins.handles.append(module.register_forward_hook(hook))


def sixteen_rate(raw: dict[str, Any]) -> dict[str, Any]:
    """Returns the config in transformers' spelling with hca layers of rate 16."""
    raw = dict(raw)
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    ratios = raw.pop("compress_ratios")[: raw["num_hidden_layers"]]
    raw["layer_types"] = [kinds[ratio] for ratio in ratios]
    raw["compress_rates"] = {kinds[4]: 4, kinds[128]: 16}
    return transformers_spelling(raw)


PARITY_CONFIGS: dict[str, dict[str, Any]] = {
    "hc4-yarn-4-128": tiny_config(rope_scaling=YARN),
    "hc2-plain-4-128": tiny_config(
        hc_mult=2, compress_ratios=[4, 0, 128, 4, 0], num_hash_layers=2, index_topk=16
    ),
    "hc2-yarn-4-16": sixteen_rate(tiny_config(hc_mult=2, rope_scaling=YARN)),
    "hc4-plain-4-16": sixteen_rate(
        tiny_config(
            sliding_window=40, head_dim=24, index_head_dim=20, index_n_heads=14, num_hash_layers=0
        )
    ),
}
"""Every layer type in each; both rope kinds, both numbers of streams, both hca rates."""


def random_tokens(num_tokens: int, seed: int, vocab_size: int = 96) -> list[int]:
    """Returns seeded token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (num_tokens,), generator=generator).tolist()
    return ids
