"""transformers' decoders as black-box oracles: tiny configs, random weights, margins.

Only tests use it. It runs in fp32, one sequence at a time, without padding.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}


def llama(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny LlamaForCausalLM."""
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {**_BASE, **names, "rope_theta": 10000.0, **overrides}


def mistral(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny MistralForCausalLM with a window in every layer."""
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {**_BASE, **names, "sliding_window": 40, "rope_theta": 10000.0, **overrides}


def qwen2(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Qwen2ForCausalLM."""
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {**_BASE, **names, "rope_theta": 1e6, "tie_word_embeddings": False, **overrides}


def qwen3(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Qwen3ForCausalLM."""
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return {**_BASE, **names, "rope_theta": 1e6, "tie_word_embeddings": True, **overrides}


def qwen3_moe(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Qwen3MoeForCausalLM; its middle layer is dense."""
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return {**_BASE, **names, **experts, "rope_theta": 1e6, **overrides}


def gemma3(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Gemma3ForCausalLM: two windows to one layer of full attention."""
    own = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 48,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    return {**_BASE, **own, **overrides}


def gpt_oss(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny GptOssForCausalLM."""
    own = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "sliding_window": 32,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "attention_bias": True,
    }
    return {**_BASE, **own, **overrides}


def qwen3_5(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Qwen3_5ForCausalLM: three recurrent layers to one of attention."""
    own = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return {**_BASE, **own, **overrides}


def kimi_linear(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny KimiLinearForCausalLM: recurrent, attention and recurrent layers last."""
    own = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": None,
        "model_max_length": 4096,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    raw = {**_BASE, **own, **overrides}
    return {name: value for name, value in raw.items() if value is not None}


def deepseek_v32(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny DeepseekV32ForCausalLM, of whose keys 32 are chosen."""
    own = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "index_topk": 32,
        "index_head_dim": 12,
        # Of few heads a relu makes scores of zero, which tie.
        "index_n_heads": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    raw = {**_BASE, **own}
    del raw["head_dim"]
    return raw


def glm_moe_dsa(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny GlmMoeDsaForCausalLM: every second layer has no indexer of its own."""
    own = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
        "n_group": 1,
        "topk_group": 1,
        "indexer_types": ["full", "shared", "full", "shared"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return deepseek_v32(**{**own, **overrides})


def glm5_next(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Glm5NextForConditionalGeneration; overrides are of its text part."""
    text = {
        **_BASE,
        "model_type": "glm5_next_text",
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 32,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "index_topk": 64,
        "index_head_dim": 16,
        # Of few heads a relu makes scores of zero, which tie.
        "index_n_heads": 32,
        "index_kpool": 4,
        "layer_types": [
            "linear_attention",
            "indexed_attention",
            *["linear_attention"] * 2,
            "indexed_attention",
        ],
        "mlp_layer_types": ["dense", *["sparse"] * 4],
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **overrides,
    }
    vision = {
        "patch_size": 14,
        "image_size": 28,
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "projection_intermediate_size": 32,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 3,
        "video_token_id": 4,
    }


_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 30.0,
}


def gemma4_small(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Gemma4ForCausalLM like E2B: shared keys and values, per-layer inputs."""
    own = {
        "num_hidden_layers": 8,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": overrides.get("vocab_size", 96),
    }
    return {**_GEMMA4, **own, **overrides}


def gemma4(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Gemma4ForCausalLM like the 12B: one product for keys and values."""
    own = {
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    }
    return {**_GEMMA4, **own, **overrides}


def gemma4_moe(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny Gemma4ForCausalLM like 26B-A4B: experts beside the MLP."""
    own = {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    }
    return gemma4(**{**own, **overrides})


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

PARITY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "llama3": llama(
        rope_scaling=_LLAMA3, rope_theta=500000.0, tie_word_embeddings=True, attention_bias=True
    ),
    "llama-one-head": llama(num_key_value_heads=1, mlp_bias=True, head_dim=24),
    "mistral": mistral(),
    "mistral-small-window": mistral(sliding_window=5, num_key_value_heads=4),
    "mistral-some-windows": mistral(
        architectures=["MinistralForCausalLM"],
        model_type="ministral",
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "qwen2": qwen2(),
    "qwen2-tied": qwen2(tie_word_embeddings=True, rope_scaling=_YARN),
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=33, max_window_layers=1),
    "qwen3": qwen3(),
    "qwen3-yarn": qwen3(rope_scaling=_YARN, tie_word_embeddings=False, attention_bias=True),
    "qwen3-window": qwen3(use_sliding_window=True, sliding_window=33, max_window_layers=1),
    "qwen3-moe": qwen3_moe(),
    "qwen3-moe-step": qwen3_moe(
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[], tie_word_embeddings=True
    ),
    "gemma3": gemma3(),
    "gemma3-small-window": gemma3(
        sliding_window=6, rope_scaling=None, final_logit_softcapping=2.0, num_key_value_heads=1
    ),
    "qwen3.5": qwen3_5(),
    "gemma4-small": gemma4_small(),
    "gemma4-moe": gemma4_moe(
        num_hidden_layers=3, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "gpt-oss": gpt_oss(),
    "gpt-oss-wide-window": gpt_oss(sliding_window=128, num_key_value_heads=1, hidden_size=64),
}
"""Every layer type, window edges, grouped queries, tied and own heads, experts, rotary kinds."""


def build_hf_model(raw: dict[str, Any], seed: int) -> Any:
    """Builds the reference with random weights, so that every tensor matters: no zeros, no ones."""
    config = AutoConfig.for_model(
        raw["model_type"], **{k: v for k, v in raw.items() if k != "model_type"}
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        # What stays as initialised is drawn from the common generator.
        torch.manual_seed(seed)
        # transformers has no text class of GLM 5.3; ids alone go through its wrapper.
        has_wrapper = raw["model_type"] == "glm5_next"
        factory = AutoModelForImageTextToText if has_wrapper else AutoModelForCausalLM
        model = factory.from_config(config)
    model.train(False)
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    hidden_size = raw.get("text_config", raw)["hidden_size"]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                # Gemma 3 stores them less one, and Qwen 3.5 but for those of recurrent layers.
                is_less_one = raw["model_type"].startswith(
                    ("gemma2", "gemma3", "qwen3_5", "qwen3_next")
                )
                base = 0.0 if is_less_one and "linear_attn" not in name else 1.0
                tensor.copy_(base + 0.2 * noise)
            elif raw["model_type"] == "glm5_next" and name.endswith(("A_log", "dt_bias")):
                tensor.copy_(0.5 * noise)  # as initialised they do nothing
            elif name.endswith(("conv1d.weight", "A_log", "dt_bias")):
                pass  # as initialised: states that neither vanish nor grow
            elif name.endswith(("scalar", "router.scale", "per_expert_scale")):
                tensor.copy_(1.0 + 0.2 * noise)
            elif name.endswith(("bias", "sinks")):
                tensor.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                tensor.copy_(noise)
            elif name.endswith("router.proj.weight"):
                # Gemma 4 scales the router's input down: without this all experts score alike.
                tensor.copy_(noise)
            else:
                tensor.copy_(noise * 1.3 * hidden_size**-0.5)
    return model


def config_as_saved(model: Any) -> dict[str, Any]:
    """Returns the config as transformers writes it."""
    spelled: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return spelled


@dataclass
class ReferenceRun:
    """One full forward of the reference.

    Attributes:
        logits: [T, V].
        margins: [T]: the least gap, at each position, between what a router chose and the next
            best; infinite without experts.
        index_margins: [T]: the same of indexers; infinite where all keys are attended to.
    """

    logits: torch.Tensor
    margins: torch.Tensor
    index_margins: torch.Tensor


class _IndexRanks(TorchFunctionMode):
    """Notes how close an indexer's choice is, while one runs.

    Owns: what it has noted, [T] of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.margins: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.topk and args[1] < args[0].shape[-1]:
            scores = args[0].float().flatten(0, -2)
            best = scores.topk(args[1] + 1, dim=-1).values
            # Keys that are not seen have the least of numbers.
            gaps = (best[:, -2] - best[:, -1]).masked_fill(best[:, -1] < -1e30, float("inf"))
            self.margins.append(gaps)
        return func(*args, **(kwargs or {}))


def run_reference(model: Any, token_ids: list[int]) -> ReferenceRun:
    """Runs the reference once, watching its routers and indexers through hooks."""
    ranks = _IndexRanks()
    margins = [torch.full((len(token_ids),), float("inf"))]
    handles = []
    config = model.config.get_text_config()
    num_chosen = getattr(config, "num_experts_per_tok", getattr(config, "top_k_experts", 0))

    def enter(mode: TorchFunctionMode) -> None:
        mode.__enter__()

    def leave(mode: TorchFunctionMode) -> None:
        mode.__exit__(None, None, None)

    def hook(module: Any, inputs: Any, outputs: Any) -> None:
        if hasattr(module, "e_score_correction_bias"):
            margins.append(_find_sigmoid_margin(module, inputs[0].flatten(0, -2), config))
            return
        scores = outputs[0] if isinstance(outputs, tuple) else outputs.flatten(0, -2)
        best = scores.float().softmax(-1).topk(num_chosen + 1, dim=-1).values
        margins.append(best[:, -2] - best[:, -1])

    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router", ".router.proj")):
            handles.append(module.register_forward_hook(hook))
        if name.endswith("self_attn.indexer"):
            handles.append(module.register_forward_pre_hook(lambda *_: enter(ranks)))
            handles.append(module.register_forward_hook(lambda *_: leave(ranks)))
    try:
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    by_indexers = torch.stack([torch.full((len(token_ids),), float("inf")), *ranks.margins])
    return ReferenceRun(logits, torch.stack(margins).amin(0), by_indexers.amin(0))


def _find_sigmoid_margin(router: Any, x: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns [T]: the least gap of a choice of groups, then of experts of the chosen groups."""
    scores = (x.float() @ router.weight.T).sigmoid() + router.e_score_correction_bias
    by_group = scores.view(len(x), config.n_group, -1)
    margin = torch.full((len(x),), float("inf"))
    if config.topk_group < config.n_group:
        sums = by_group.sort(-1, descending=True).values[..., :2].sum(-1)
        ranked = sums.sort(-1, descending=True)
        margin = ranked.values[:, config.topk_group - 1] - ranked.values[:, config.topk_group]
        left = ranked.indices[:, config.topk_group :]
        by_group = by_group.scatter(1, left[..., None].expand(-1, -1, by_group.shape[2]), -1e9)
    best = by_group.flatten(1).sort(-1, descending=True).values
    count = config.num_experts_per_tok
    return torch.minimum(margin, best[:, count - 1] - best[:, count])


def published_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns a model's tensors by the names in the files that transformers writes."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
