"""A tiny DeepSeek-V4 as a GGUF file, written by the ``gguf`` package from published tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model_executor.model_loader.gguf_files import Type, gguf, store

Kinds = Callable[[str], Type]
"""The file's name of a matrix -> how it is stored."""

YARN = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_TOP = {"embed": "token_embd", "head": "output", "norm": "output_norm"}
_PARTS = {
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "ffn.gate": "ffn_gate_inp",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
}
_LEAVES = {
    "attn.attn_sink": "attn_sinks.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
}
_STACKS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_MTP = {"enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "norm": "nextn.shared_head_norm"}


def write_keys(
    writer: gguf.GGUFWriter, raw: dict[str, Any], blocks: int, *, has_tokens: bool = True
) -> None:
    """Writes what the file says of a config, with so many blocks that draft."""
    layers = raw["num_hidden_layers"]
    own = writer.arch
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(layers + blocks)
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(raw["sliding_window"])
    writer.add_rope_dimension_count(raw["qk_rope_head_dim"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_expert_count(raw["n_routed_experts"])
    writer.add_expert_used_count(raw["num_experts_per_tok"])
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(f"{own}.expert_gating_func", 4)
    numbers = {
        "attention.q_lora_rank": raw["q_lora_rank"],
        "attention.output_group_count": raw["o_groups"],
        "attention.output_lora_rank": raw["o_lora_rank"],
        "attention.indexer.head_count": raw["index_n_heads"],
        "attention.indexer.key_length": raw["index_head_dim"],
        "attention.indexer.top_k": raw["index_topk"],
        "hyper_connection.count": raw["hc_mult"],
        "hyper_connection.sinkhorn_iterations": 20,
        "hash_layer_count": raw["num_hash_layers"],
        "rope.scaling.original_context_length": 64,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"{own}.{name}", number)
    writer.add_array(f"{own}.attention.compress_ratios", raw["compress_ratios"])
    writer.add_array(f"{own}.swiglu_clamp_exp", [10.0] * (layers + blocks))
    writer.add_float32(f"{own}.attention.compress_rope_freq_base", raw["compress_rope_theta"])
    writer.add_float32(f"{own}.hyper_connection.epsilon", 1e-6)
    writer.add_string(f"{own}.rope.scaling.type", "yarn")
    writer.add_float32(f"{own}.rope.scaling.factor", 16.0)
    if blocks:
        writer.add_uint32(f"{own}.nextn_predict_layers", blocks)
    if has_tokens:
        writer.add_token_list([f"<{i}>" for i in range(raw["vocab_size"])])


def find_name(name: str, num_layers: int) -> str:
    """Returns the file's name of a published tensor that is one tensor there."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    if name.startswith("hc_head_"):
        return f"output_{name.replace('_head_', '_')}.weight"
    kind, number, part = name.split(".", 2)
    block = f"blk.{num_layers if kind == 'mtp' else number}"
    if part in _LEAVES:
        return f"{block}.{_LEAVES[part]}"
    if kind == "mtp" and part.startswith("hc_head_"):
        return f"output_{part.replace('_head_', '_')}.weight"
    if part.startswith("hc_"):
        return f"{block}.{part}.weight"
    stem, _, leaf = part.rpartition(".")
    if kind == "mtp" and stem in _MTP:
        return f"{block}.{_MTP[stem]}.{leaf}"
    return f"{block}.{_PARTS.get(stem, stem)}.{leaf}"


def write_v4(
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    path: Path,
    kinds: Kinds,
    *,
    is_numbered: bool = True,
) -> dict[str, torch.Tensor]:
    """Writes a file, and beside it ``mtp-`` one of the block if there is one; returns the twin."""
    layers = raw["num_hidden_layers"]
    writers = {False: gguf.GGUFWriter(path, "deepseek4")}
    write_keys(writers[False], raw, 0)
    if any(name.startswith("mtp.") for name in tensors):
        writers[True] = gguf.GGUFWriter(path.with_name(f"mtp-{path.name}"), "deepseek4")
        write_keys(writers[True], raw, 1)
    twin = {name: value.float() for name, value in tensors.items()}
    stacks: dict[tuple[bool, str], dict[int, tuple[str, np.ndarray]]] = {}

    def add(is_draft: bool, name: str, value: np.ndarray) -> np.ndarray:
        kind = kinds(name) if value.ndim > 1 else Type.F32
        if is_draft and not is_numbered:
            name = name.replace("output_hc_", "mtp.0.hc_head_").replace(f"blk.{layers}.", "mtp.0.")
            name = name.replace("nextn.", "").replace("shared_head_norm", "norm")
        flat = np.ascontiguousarray(value.reshape(-1, value.shape[-1]))
        stored, decoded = store(kind, flat, len(name))
        writers[is_draft].add_tensor(
            name, stored.reshape(*value.shape[:-1], -1), raw_dtype=None if kind < 2 else kind
        )
        return decoded.reshape(value.shape)

    pair: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        is_draft = name.startswith("mtp.")
        if name.endswith("tid2eid"):
            values = tensor.numpy().astype(np.int32)
            writers[is_draft].add_tensor(find_name(name, layers), values)
            twin[name] = tensor
        elif ".ffn.experts." in name:
            prefix, _, rest = name.partition(".ffn.experts.")
            expert, matrix, _ = rest.split(".")
            block = f"blk.{layers if is_draft else prefix.split('.')[1]}"
            stack = stacks.setdefault((is_draft, f"{block}.{_STACKS[matrix]}.weight"), {})
            stack[int(expert)] = (name, tensor.float().numpy())
        elif name.endswith((".e_proj.weight", ".h_proj.weight")):
            pair[name] = tensor.float().numpy()
        else:
            value = add(is_draft, find_name(name, layers), tensor.float().numpy())
            twin[name] = torch.from_numpy(value.copy())
    for (is_draft, stored_name), own in stacks.items():
        names = [own[expert][0] for expert in range(len(own))]
        values = add(is_draft, stored_name, np.stack([own[e][1] for e in range(len(own))]))
        twin |= {name: torch.from_numpy(v.copy()) for name, v in zip(names, values, strict=True)}
    if pair and not is_numbered:
        for name, half in pair.items():
            twin[name] = torch.from_numpy(add(True, name, half).copy())
    elif pair:
        halves = [pair[f"mtp.0.{half}.weight"] for half in ("e_proj", "h_proj")]
        joined = add(True, f"blk.{layers}.nextn.eh_proj.weight", np.concatenate(halves, 1))
        for half, value in zip(("e_proj", "h_proj"), np.split(joined, 2, 1), strict=True):
            twin[f"mtp.0.{half}.weight"] = torch.from_numpy(value.copy())
        for name in ("embed", "head", "norm"):
            add(True, f"{_TOP[name]}.weight", tensors[f"{name}.weight"].float().numpy())
    for writer in writers.values():
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return twin
