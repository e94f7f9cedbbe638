"""GGUF files of tiny models, written by the ``gguf`` package from transformers' state dicts.

``write_gguf`` also returns the twin: the values that the file's tensors mean, by the names of the
family's releases, decoded by that package.
"""

from pathlib import Path
from typing import Any

import gguf  # an oracle of the tests, in requirements/dev.txt
import numpy as np
import torch

from vllm.tokenizers import Tokenizer

Type = gguf.GGMLQuantizationType
GGML_QUANT_SIZES = gguf.constants.GGML_QUANT_SIZES

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
OTHER_PARTS = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}
OTHER_PARTS["gemma4"] = OTHER_PARTS["gemma3"] | {
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
OTHER_PARTS["qwen3.5"] = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
# Of the block behind the layers, named by its number as they are.
OTHER_PARTS["qwen3.5"] |= {
    f"nextn.{part}": f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
}
OTHER_PARTS["qwen3.5-moe"] = OTHER_PARTS["qwen3.5"]
# Parts of recurrent layers with something of every value head.
HEADED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "dt_bias", "A_log")
# Vectors whose names end otherwise than in ".weight" on one side.
VECTORS = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "gemma3": "gemma3",
}
ARCHITECTURES |= {"gpt-oss": "gpt-oss", "gemma4": "gemma4", "qwen3.5": "qwen35"}
ARCHITECTURES["qwen3.5-moe"] = "qwen35moe"
# Where scales of fp16 lie in a block, if not at its start: IQ1_M's is in parts, and set apart.
SCALES_AT = {
    Type.Q4_1: (0, 2),
    Type.Q5_1: (0, 2),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
}
# How many times the scale a value is, about.
STEPS = {Type.Q8_0: 70, Type.Q4_K: 240, Type.Q5_K: 480, Type.IQ4_XS: 1600, Type.IQ4_NL: 60}
STEPS |= {Type.Q6_K: 2000, Type.Q2_K: 20, Type.Q3_K: 40, Type.IQ2_XXS: 60, Type.IQ2_XS: 60}
STEPS |= {Type.IQ2_S: 60, Type.IQ3_XXS: 120, Type.IQ3_S: 130, Type.IQ1_S: 6, Type.IQ1_M: 6}
STEPS |= {Type.TQ1_0: 1, Type.TQ2_0: 1, Type.Q1_0: 1}


def random_blocks(kind: Type, num_rows: int, width: int, seed: int, size: float) -> np.ndarray:
    """Returns random blocks of a type, uint8 [rows, bytes]; values are about ``size``."""
    rng = np.random.default_rng(seed)
    per_block, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows, width // per_block, num_bytes), dtype=np.uint8)

    def put(at: int, scale: float) -> None:
        values = (scale * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = values[..., None].view(np.uint8)

    if kind == Type.NVFP4:
        blocks[:, :, :4] = rng.integers(1, 20, (*blocks.shape[:2], 4))
    elif kind == Type.MXFP4:
        blocks[:, :, 0] = rng.integers(119, 123, blocks.shape[:2])
    elif kind == Type.IQ1_M:
        # The top nibbles of four words are the scale.
        scales = (size / STEPS[kind] * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        words = blocks[:, :, 48:].copy().view(np.uint16)
        quarters = scales.view(np.uint16)[..., None] >> (4 * np.arange(4, dtype=np.uint16))
        blocks[:, :, 48:] = ((words & 0xFFF) | ((quarters & 15) << 12)).view(np.uint8)
    else:
        for at in SCALES_AT.get(kind, (0,)):
            put(at, size / STEPS.get(kind, 8))
    return blocks.reshape(num_rows, -1)


def store(kind: Type, matrix: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a matrix as stored by a type, and the fp32 values of that."""
    if kind in (Type.F32, Type.F16, Type.BF16):
        stored = gguf.quants.quantize(matrix, kind)
    else:
        # The package rounds to some types only; random blocks do as well.
        stored = random_blocks(kind, matrix.shape[0], matrix.shape[1], seed, float(matrix.std()))
    return stored, dequantize(stored, kind)


def dequantize(stored: np.ndarray, kind: Type) -> np.ndarray:
    """Returns what stored rows mean, fp32; the package has no decoder of Q1_0."""
    if kind != Type.Q1_0:
        return gguf.quants.dequantize(stored, kind)
    blocks = stored.reshape(len(stored), -1, 18)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little")
    return np.where(bits == 1, scales, -scales).reshape(len(stored), -1)


def pair_rows(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Puts the rows of Llama's queries and keys as its files have them."""
    heads = matrix.reshape(-1, 2, head_dim // 2, matrix.shape[-1])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def tile_heads(value: np.ndarray, raw: dict[str, Any], *, back: bool = False) -> np.ndarray:
    """Puts value heads, given those of a key head together, first of each first; or back."""
    keys = raw["linear_num_key_heads"]
    sizes = (keys, raw["linear_num_value_heads"] // keys)
    rows = value.reshape(*(reversed(sizes) if back else sizes), -1, *value.shape[1:])
    return rows.swapaxes(0, 1).reshape(value.shape)


def tile(name: str, value: np.ndarray, raw: dict[str, Any], *, back: bool = False) -> np.ndarray:
    """Moves the value heads of a recurrent layer's part as files have them, or back."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "out_proj":
        return tile_heads(value.T, raw, back=back).T
    if leaf not in HEADED:
        return value
    first = 0
    if leaf in ("in_proj_qkv", "conv1d"):
        first = 2 * raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
    return np.concatenate([value[:first], tile_heads(value[first:], raw, back=back)])


def unpair_rows(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    heads = matrix.reshape(-1, head_dim // 2, 2, matrix.shape[-1])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def write_keys(writer: gguf.GGUFWriter, family: str, raw: dict[str, Any]) -> None:
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw.get("rope_theta", 1_000_000.0))
    if family == "gemma4":
        write_gemma4_keys(writer, raw)
        return
    if "intermediate_size" in raw:
        writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    if family.startswith("qwen3.5"):
        write_recurrent_keys(writer, raw)
    if family in ("gemma3", "gpt-oss"):
        writer.add_sliding_window(raw["sliding_window"])
    if family in ("qwen3-moe", "qwen3.5-moe"):
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if family == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(raw["rope_scaling"]["factor"])
    if family == "gpt-oss":
        writer.add_expert_count(raw["num_local_experts"])
        writer.add_expert_used_count(raw["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
        scaling = raw.get("rope_scaling") or raw["rope_parameters"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def write_recurrent_keys(writer: gguf.GGUFWriter, raw: dict[str, Any]) -> None:
    """Writes the shape of recurrent layers, and the part of a head that is turned."""
    values = raw["linear_num_value_heads"] * raw["linear_value_head_dim"]
    writer.add_ssm_conv_kernel(raw["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(raw["linear_key_head_dim"])
    writer.add_ssm_group_count(raw["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(raw["linear_num_value_heads"])
    writer.add_ssm_inner_size(values)
    writer.add_full_attention_interval(4)
    kinds = raw.get("layer_types", ())
    if any((kind == "full_attention") == bool((i + 1) % 4) for i, kind in enumerate(kinds)):
        listed = [kind == "linear_attention" for kind in kinds]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", listed)
    if raw.get("mtp_num_hidden_layers"):
        writer.add_nextn_predict_layers(1)
    rope = raw["rope_parameters"]
    writer.add_rope_dimension_count(int(raw["head_dim"] * rope["partial_rotary_factor"]))
    # A file of texts alone has none.
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([*rope.get("mrope_section", (2, 1, 1)), 0])
    if "shared_expert_intermediate_size" in raw:
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])


def write_gemma4_keys(writer: gguf.GGUFWriter, raw: dict[str, Any]) -> None:
    """Writes what differs by layer, and the share of full layers' pairs that is turned."""
    layers, shared = raw["num_hidden_layers"], raw.get("num_kv_shared_layers", 0)
    is_local = [kind == "sliding_attention" for kind in raw["layer_types"]]
    writer.add_sliding_window_pattern(is_local)
    writer.add_sliding_window(raw["sliding_window"])
    full_heads = raw.get("num_global_key_value_heads") or raw["num_key_value_heads"]
    writer.add_head_count_kv([raw["num_key_value_heads"] if w else full_heads for w in is_local])
    wide = 2 if raw.get("use_double_wide_mlp") else 1
    width = raw["intermediate_size"]
    writer.add_feed_forward_length([width] * (layers - shared) + [wide * width] * shared)
    writer.add_shared_kv_layers(shared)
    writer.add_key_length(raw["global_head_dim"])
    writer.add_value_length(raw["global_head_dim"])
    writer.add_key_length_swa(raw["head_dim"])
    writer.add_value_length_swa(raw["head_dim"])
    writer.add_rope_freq_base_swa(10_000.0)
    writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    writer.add_embedding_length_per_layer_input(raw["hidden_size_per_layer_input"])
    pairs = raw["global_head_dim"] // 2
    turned = np.arange(pairs) < pairs // 4
    writer.add_tensor("rope_freqs.weight", np.where(turned, 1, 1e30).astype(np.float32))
    if raw.get("enable_moe_block"):
        writer.add_expert_count(raw["num_experts"])
        writer.add_expert_used_count(raw["top_k_experts"])
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Writes a byte-level tokenizer's vocabulary and merges."""
    import json

    state = json.loads(tokenizer.backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    names = {number: token for token, number in state["model"]["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [names.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in added else 1 if i in names else 5 for i in range(vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    numbered = {"eos_token": writer.add_eos_token_id, "bos_token": writer.add_bos_token_id}
    for name, add in numbered.items():
        if (token := tokenizer.template_tokens.get(name)) is not None:
            add(tokens.index(token))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def write_gguf(
    family: str,
    raw: dict[str, Any],
    state: dict[str, torch.Tensor],
    path: Path,
    kinds: list[Type],
    tokenizer: Tokenizer | None = None,
    tokens: list[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a model's file, its matrices in turn in the types; returns the twin's tensors."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    write_keys(writer, family, raw)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, raw["vocab_size"])
    else:
        writer.add_token_list(tokens or [f"<{i}>" for i in range(raw["vocab_size"])])
    twin: dict[str, torch.Tensor] = {}
    for index, (name, value) in enumerate(state.items()):
        kind = kinds[index % len(kinds)]
        own = _Matrix(family, raw, name, value.float().numpy(), kind, index)
        for stored_name, stored, stored_kind in own.out:
            is_plain = stored_kind in (Type.F32, Type.F16)
            writer.add_tensor(stored_name, stored, raw_dtype=None if is_plain else stored_kind)
        twin[name] = torch.from_numpy(own.twin.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return twin


class _Matrix:
    """One tensor of a release, as the file's tensors that hold it."""

    def __init__(
        self,
        family: str,
        raw: dict[str, Any],
        name: str,
        value: np.ndarray,
        kind: Type,
        seed: int,
    ) -> None:
        self._family, self._raw, self._name = family, raw, name
        self._value, self._kind, self._seed = value, kind, seed
        self.twin = value
        self.out: list[tuple[str, np.ndarray, Type]] = []
        self._split()

    def _add(self, name: str, value: np.ndarray, kind: Type = Type.F32) -> None:
        self.out.append((name, value, kind))

    def _split(self) -> None:
        name, value = self._name, self._value
        stem, _, leaf = name.rpartition(".")
        if stem in TOP:
            self._matrix_or_norm(f"{TOP[stem]}.{leaf}")
            return
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}"
        if part in VECTORS:
            if "linear_attn" in part:
                value = tile(part, value, self._raw)
            if part.endswith("A_log"):
                value = -np.exp(value)
                self.twin = tile(part, np.log(-value), self._raw, back=True)
            self._add(f"{prefix}.{VECTORS[part]}", value)
        elif part == "experts.gate_up_proj":
            self.twin = self._stack(f"{prefix}.ffn_gate_up_exps.weight", value, 0)
        elif part == "experts.down_proj":
            self.twin = self._stack(f"{prefix}.ffn_down_exps.weight", value, 1)
        elif ".experts." in part:
            self._experts(prefix, part.rsplit(".", 1)[1])
        else:
            stem, _, leaf = part.rpartition(".")
            names = {**PARTS, **OTHER_PARTS.get(self._family, {})}
            self._matrix_or_norm(f"{prefix}.{names[stem]}.{leaf}")

    def _matrix_or_norm(self, stored_name: str) -> None:
        value = self._value
        if value.ndim == 1 or "ffn_gate_inp" in stored_name or "conv1d" in stored_name:
            is_norm = "norm" in stored_name and "ssm_norm" not in stored_name
            adds_one = self._family == "gemma3" or self._family.startswith("qwen3.5")
            added = 1 if adds_one and is_norm else 0
            if "conv1d" in stored_name:
                value = tile(self._name, value, self._raw).squeeze(1)
            if "shexp" in stored_name:
                value = value[0]
            self._add(stored_name, value + np.float32(added))
            if added:
                # One fp32 rounding, which the twin takes too.
                self.twin = (value + np.float32(1)) - np.float32(1)
            return
        is_paired = self._family == "llama" and stored_name.split(".")[-2] in ("attn_q", "attn_k")
        head_dim = self._raw["head_dim"]
        if value.shape[-1] % GGML_QUANT_SIZES[self._kind][0]:
            # What a converter falls back to where blocks do not fill a row.
            self._kind = Type.F16
        source = pair_rows(value, head_dim) if is_paired else value
        if "linear_attn" in self._name:
            source = np.ascontiguousarray(tile(self._name, value, self._raw))
        stored, decoded = store(self._kind, source, self._seed)
        self._add(stored_name, stored, self._kind)
        decoded = decoded * self._add_scales(stored_name, 1)
        self.twin = unpair_rows(decoded, head_dim) if is_paired else decoded
        if "linear_attn" in self._name:
            self.twin = tile(self._name, decoded, self._raw, back=True)

    def _experts(self, prefix: str, leaf: str) -> None:
        value = self._value
        if leaf == "down_proj_bias":
            self._add(f"{prefix}.ffn_down_exps.bias", value)
            return
        if leaf == "gate_up_proj_bias":
            self._add(f"{prefix}.ffn_gate_exps.bias", value[:, 0::2].copy())
            self._add(f"{prefix}.ffn_up_exps.bias", value[:, 1::2].copy())
            return
        # gpt-oss's releases hold [experts, in, out], and gate and up alternating.
        is_gpt = self._family == "gpt-oss"
        rows = value.swapaxes(1, 2) if is_gpt else value
        if leaf == "down_proj":
            decoded = self._stack(f"{prefix}.ffn_down_exps.weight", rows, 0)
        elif is_gpt:
            decoded = np.empty_like(rows)
            decoded[:, 0::2] = self._stack(f"{prefix}.ffn_gate_exps.weight", rows[:, 0::2], 0)
            decoded[:, 1::2] = self._stack(f"{prefix}.ffn_up_exps.weight", rows[:, 1::2], 1)
        else:
            gate, up = np.split(rows, 2, axis=1)
            decoded = np.concatenate(
                [
                    self._stack(f"{prefix}.ffn_gate_exps.weight", gate, 0),
                    self._stack(f"{prefix}.ffn_up_exps.weight", up, 1),
                ],
                axis=1,
            )
        self.twin = decoded.swapaxes(1, 2) if is_gpt else decoded

    def _stack(self, name: str, rows: np.ndarray, number: int) -> np.ndarray:
        parts = [
            store(self._kind, np.ascontiguousarray(matrix), 1000 * self._seed + 10 * e + number)
            for e, matrix in enumerate(rows)
        ]
        self._add(name, np.stack([stored for stored, _ in parts]), self._kind)
        scales = self._add_scales(name, len(parts))
        return np.stack([decoded for _, decoded in parts]) * scales[:, None, None]

    def _add_scales(self, name: str, count: int) -> np.ndarray:
        """Adds what NVFP4 matrices are multiplied by, and what their inputs would be divided by."""
        if self._kind != Type.NVFP4:
            return np.ones(count, np.float32)
        scales = np.linspace(0.3, 0.7, count + self._seed % 3, dtype=np.float32)[-count:]
        for leaf in (".scale", ".input_scale"):
            self._add(name.replace(".weight", leaf), scales)
        return scales
