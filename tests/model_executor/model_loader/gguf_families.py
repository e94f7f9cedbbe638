"""GGUF files of other families, in F32, named by the ``gguf`` package's own map."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model_executor.model_loader.gguf_files import (
    gguf,
    pair_rows,
    write_recurrent_keys,
    write_tokenizer,
)
from vllm.tokenizers import Tokenizer


def write_keys(
    writer: gguf.GGUFWriter, arch: str, raw: dict[str, Any], *, has_whole_heads: bool = False
) -> None:
    """Writes what a config says, as the converters do."""
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
    rope = raw.get("rope_parameters") or {"rope_theta": raw["rope_theta"]}
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(raw.get("rms_norm_eps") or raw["norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch.startswith("lfm2"):
        heads = raw["num_key_value_heads"]
        writer.add_head_count_kv([heads * (kind != "conv") for kind in raw["layer_types"]])
        writer.add_shortconv_l_cache(raw["conv_L_cache"])
        if arch == "lfm2moe":
            writer.add_leading_dense_block_count(raw["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif arch not in _LATENT:
        writer.add_head_count_kv(raw["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "sliding_window" in raw:
        writer.add_sliding_window(raw["sliding_window"])
    if "attn_logit_softcapping" in raw:
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            share = 0.1 if arch in _LATENT else 1.0
            writer.add_rope_scaling_yarn_log_mul(share * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "num_experts_per_tok" in raw:
        count = next(raw[n] for n in _COUNTS if n in raw)
        writer.add_expert_count(count)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        width = raw.get("moe_intermediate_size", raw["intermediate_size"])
        writer.add_expert_feed_forward_length(width)
    if "shared_expert_intermediate_size" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if arch in ("glm4moe", "minimax-m2"):
        writer.add_rope_dimension_count(head_dim // 2)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "n_routed_experts" in raw:
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(raw["norm_topk_prob"])
        if "n_group" in raw:
            writer.add_expert_group_count(raw["n_group"])
            writer.add_expert_group_used_count(raw["topk_group"])
    if arch == "phi3":
        turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(turned)
    if "long_factor" in rope:
        length = rope["original_max_position_embeddings"]
        stretch = raw["max_position_embeddings"] / length
        writer.add_rope_scaling_orig_ctx_len(length)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(length)))
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if arch == "qwen3next":
        write_recurrent_keys(writer, raw)
    if arch in _LATENT:
        write_latent_keys(writer, raw, has_whole_heads=has_whole_heads)
    if "index_topk" in raw:
        write_indexer_keys(writer, arch, raw)


_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
_LATENT = ("deepseek2", "deepseek32", "glm-dsa")


def write_indexer_keys(writer: gguf.GGUFWriter, arch: str, raw: dict[str, Any]) -> None:
    """Writes what chooses keys."""
    for name, number in {
        "head_count": raw["index_n_heads"],
        "key_length": raw["index_head_dim"],
        "top_k": raw["index_topk"],
    }.items():
        writer.add_uint32(f"{arch}.attention.indexer.{name}", number)
    if "indexer_types" in raw:
        kinds = [kind == "full" for kind in raw["indexer_types"]]
        writer.add_array(f"{arch}.attention.indexer.types", kinds)


def write_latent_keys(
    writer: gguf.GGUFWriter, raw: dict[str, Any], *, has_whole_heads: bool
) -> None:
    """Writes the widths of cached rows and of heads."""
    turned, rank = raw["qk_rope_head_dim"], raw["kv_lora_rank"]
    writer.add_kv_lora_rank(rank)
    if raw["q_lora_rank"]:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    if has_whole_heads:
        writer.add_head_count_kv(raw["num_attention_heads"])
        writer.add_key_length(raw["qk_nope_head_dim"] + turned)
        writer.add_value_length(raw["v_head_dim"])
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + turned)
        writer.add_value_length(rank)
        writer.add_key_length_mla(raw["qk_nope_head_dim"] + turned)
        writer.add_value_length_mla(raw["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    is_v3 = raw["model_type"] != "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)


def add_recurrent(
    add: Callable[[str, np.ndarray], None],
    block: str,
    leaf: str,
    value: np.ndarray,
    raw: dict[str, Any],
) -> None:
    """Adds a tensor of Qwen3-Next's recurrent layers, whose projections lie by key head."""
    heads, key_dim = raw["linear_num_key_heads"], raw["linear_key_head_dim"]
    share = raw["linear_num_value_heads"] // heads * raw["linear_value_head_dim"]
    if leaf == "in_proj_qkvz.weight":
        by_head = value.reshape(heads, -1, value.shape[1])
        bounds = [key_dim, 2 * key_dim, 2 * key_dim + share]
        parts = [part.reshape(-1, value.shape[1]) for part in np.split(by_head, bounds, 1)]
        add(f"{block}.attn_qkv.weight", np.concatenate(parts[:3]))
        add(f"{block}.attn_gate.weight", parts[3])
    elif leaf == "A_log":
        add(f"{block}.ssm_a", -np.exp(value))
    elif leaf == "conv1d.weight":
        add(f"{block}.ssm_conv1d.weight", value[:, 0])
    else:
        add(f"{block}.{_RECURRENT[leaf]}", value)


_RECURRENT = {
    "in_proj_ba.weight": "ssm_ba.weight",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


# The names of tensors of recurrent and latent layers, which are the published ones' otherwise.
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    **{f"self_attn.{part}_conv1d.weight": f"ssm_conv1d_{part}.weight" for part in "qkv"},
    **{
        f"self_attn.{part}_proj.weight": f"ssm_{part}.weight"
        for part in ("f_a", "f_b", "g_a", "g_b")
    },
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{
        f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight"
        for part in ("gate", "up", "down")
    },
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
}
_LEAVES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}


def write_recurrent_keys_by_channel(
    writer: gguf.GGUFWriter, arch: str, raw: dict[str, Any]
) -> None:
    """Writes what a config of Kimi Linear or GLM 5.3 says."""
    count, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    own = raw.get("linear_attn_config", {})
    turned, rank = raw["qk_rope_head_dim"], raw["kv_lora_rank"]
    writer.add_context_length(raw.get("model_max_length", raw.get("max_position_embeddings")))
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(count)
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    kinds = raw.get("layer_types") or [
        "full" if i + 1 in own["full_attn_layers"] else "linear_attention" for i in range(count)
    ]
    writer.add_head_count_kv([int(kind != "linear_attention") for kind in kinds])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(turned)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(raw["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(raw["v_head_dim"])
    writer.add_uint32(f"{arch}.kda.head_dim", own.get("head_dim") or raw["linear_head_dim"])
    writer.add_ssm_conv_kernel(4)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(raw.get("num_experts", raw.get("n_routed_experts")))
    writer.add_expert_used_count(raw.get("num_experts_per_token", raw.get("num_experts_per_tok")))
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(raw.get("routed_scaling_factor", 2.5))
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "glm5-next":
        writer.add_q_lora_rank(raw["q_lora_rank"])
        write_indexer_keys(writer, arch, raw)
        for name, number in {
            "attention.indexer.kpool": raw["index_kpool"],
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 20,
        }.items():
            writer.add_uint32(f"{arch}.{name}", number)
        writer.add_float32(f"{arch}.hyper_connection.epsilon", 1e-6)
        writer.add_float32(f"{arch}.kda.gate_lower_bound", -5.0)
        writer.add_array(f"{arch}.swiglu_clamp_exp", [10.0] * count)


def write_recurrent_family(
    arch: str, raw: dict[str, Any], tensors: dict[str, torch.Tensor], path: Path
) -> None:
    """Writes a model of recurrent layers with a decay a channel, of our own model's tensors."""
    writer = gguf.GGUFWriter(path, arch)
    write_recurrent_keys_by_channel(writer, arch, raw)
    writer.add_token_list([f"<{i}>" for i in range(raw["vocab_size"])])
    stacks: dict[str, dict[int, np.ndarray]] = {}

    def add(name: str, value: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(value))

    for name, tensor in tensors.items():
        value = tensor.float().numpy()
        if ".layers." not in name:
            add(_NAMES[name], value)
            continue
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        block, rest = f"blk.{number}", rest.replace("block_sparse_moe.", "mlp.")
        if ".experts." in rest:
            expert, leaf, _ = rest.rpartition("experts.")[2].split(".")
            stack = stacks.setdefault(f"{block}.ffn_{_LEAVES[leaf]}_exps.weight", {})
            stack[int(expert)] = value
        elif rest == "self_attn.kv_b_proj.weight":
            by_head = value.reshape(raw["num_attention_heads"], -1, value.shape[1])
            keys, values = np.split(by_head, [raw["qk_nope_head_dim"]], 1)
            add(f"{block}.attn_k_b.weight", keys.swapaxes(1, 2))
            add(f"{block}.attn_v_b.weight", values)
        elif rest == "self_attn.A_log":
            rates = -np.exp(value).flatten()
            add(f"{block}.ssm_a", rates if arch == "glm5-next" else rates.reshape(1, 1, -1, 1))
        elif rest.endswith("_conv1d.weight"):
            add(f"{block}.{_NAMES[rest]}", value[None])
        elif rest.startswith("hc_"):
            add(f"{block}.{rest}.weight", value)
        else:
            add(f"{block}.{_NAMES[rest]}", value)
    for name, own in stacks.items():
        add(name, np.stack([own[expert] for expert in range(len(own))]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_family(
    arch: str,
    raw: dict[str, Any],
    state: dict[str, torch.Tensor],
    path: Path,
    *,
    has_whole_heads: bool = False,
    tokenizer: Tokenizer | None = None,
    write_more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Writes a model's file; of old ones keys and values of latents are one matrix."""
    writer = gguf.GGUFWriter(path, arch)
    write_keys(writer, arch, raw, has_whole_heads=has_whole_heads)
    if tokenizer is None:
        writer.add_token_list([f"<{i}>" for i in range(raw["vocab_size"])])
    else:
        write_tokenizer(writer, tokenizer, raw["vocab_size"])
    write_more(writer)
    # The package has no map of its own for it, but for a model with the same layers.
    known = "glm-dsa" if arch == "deepseek32" else arch
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(number, raw["num_hidden_layers"])

    def add(name: str, value: np.ndarray) -> None:
        writer.add_tensor(name, np.ascontiguousarray(value))

    for name, tensor in state.items():
        value = tensor.float().numpy()
        block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if ".linear_attn." in name:
            add_recurrent(add, block, name.rpartition("linear_attn.")[2], value, raw)
            continue
        if arch in ("gemma2", "gemma-embedding", "qwen3next") and "norm" in name:
            value = value + np.float32(1)
        if name == "lm_head.weight" and raw.get("tie_word_embeddings", True):
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, 1)
            add(f"{block}.ffn_gate_exps.weight", gate)
            add(f"{block}.ffn_up_exps.weight", up)
        elif name.endswith("experts.down_proj"):
            add(f"{block}.ffn_down_exps.weight", value)
        elif name.endswith(("e_score_correction_bias", "expert_bias")):
            add(f"{block}.exp_probs_b.bias", value)
        elif name.endswith("kv_b_proj.weight") and not has_whole_heads:
            by_head = value.reshape(raw["num_attention_heads"], -1, value.shape[1])
            keys, values = np.split(by_head, [raw["qk_nope_head_dim"]], 1)
            add(f"{block}.attn_k_b.weight", keys.swapaxes(1, 2))
            add(f"{block}.attn_v_b.weight", values)
        else:
            if arch == "mistral3" and name.endswith(("q_proj.weight", "k_proj.weight")):
                value = pair_rows(value, raw["head_dim"])
            if name.endswith("shared_expert_gate.weight"):
                value = value[0]
            if name.endswith(".conv.conv.weight"):
                value = value[:, 0]
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            add(found, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
