"""transformers' model over the values that a GGUF file means, decoded by the ``gguf`` package."""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.model_executor.model_loader.gguf_config import read_gguf_config

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PART = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_PART = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def load_oracle(path: Path) -> Any:
    """Return transformers' model of a file's weights in fp32, for evaluation."""
    raw = read_gguf_config(path)
    kind = raw["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {_rename(t.name, kind): _decode(t, raw) for t in gguf.GGUFReader(path).tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def _rename(name: str, kind: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part, leaf = name.split(".")
    parts = _PART | (_GEMMA_PART if kind.startswith("gemma") else {})
    return f"model.layers.{layer}.{parts[part]}.{leaf}"


def _decode(tensor: Any, raw: dict[str, Any]) -> torch.Tensor:
    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    is_norm = tensor.name.endswith("norm.weight")
    if raw["model_type"].startswith("gemma3") and is_norm:
        return values - 1  # transformers multiplies by one more than it stores
    if raw["model_type"] == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
        # Files keep the two halves of a head's turned pairs side by side.
        return (
            values.reshape(-1, raw["head_dim"] // 2, 2, values.shape[-1])
            .transpose(1, 2)
            .reshape(values.shape)
        )
    return values
