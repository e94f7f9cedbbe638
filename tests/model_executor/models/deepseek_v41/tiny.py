"""A DeepSeek-V4.1 small enough for tests, its weights, and a checkpoint folder of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, normalizers

from tests.model_executor.models.deepseek_v41.reference import Reference
from tests.model_executor.models.hf_reference import YARN, randomize_
from tests.model_executor.published import decode_plainly
from tests.tokenizers.family_tokenizers import byte_level
from tools.checkpoints.published_spelling import Spelling, write_config, write_shards
from vllm.model_executor.models.deepseek_v41.block import DeepseekV41Block
from vllm.model_executor.models.deepseek_v41.config import DeepseekV41Config
from vllm.model_executor.models.deepseek_v41.model import DeepseekV41ForCausalLM
from vllm.tokenizers import Tokenizer
from vllm.v1.attention.ops.registry import get_reference_op

VOCAB = 96
BYTE_VOCAB = 264
FOLDED = [token_id if token_id < 80 else token_id - 80 for token_id in range(VOCAB)]


def tiny_v41(**overrides: Any) -> dict[str, Any]:
    """Returns a tiny config with every kind of layer: sources, choosers, candidates, tables."""
    base: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 8,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7, 9],
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "index_n_heads": 12,
        "index_head_dim": 16,
        "index_topk": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {**YARN, "rope_type": "yarn"},
        "engram_layer_ids": [1, 4],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 50,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": max(FOLDED) + 1,
        "image_token_id": 95,
    }
    return {**base, **overrides}


def random_weights(slots: dict[str, torch.Tensor], num_experts: int, seed: int) -> dict[str, Any]:
    """Returns values for a model's slots, those of tables included."""
    tensors = {name: torch.empty(slot.shape) for name, slot in slots.items()}
    randomize_(tensors, num_experts, seed)
    for name, tensor in tensors.items():
        if name.endswith(("q_weight", "k_weight")):
            tensor.mul_(tensor.shape[-1] ** 0.5 / 1.3).add_(1)
        if name.endswith("engram.embed.weight"):
            tensor.mul_(tensor.shape[-1] ** 0.5)
    return tensors


def fold_by_library(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns the folded ids as the tokenizers library's normalizers make them."""
    steps = [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), "\ue000"),
        normalizers.Strip(),
        normalizers.Replace("\ue000", " "),
    ]
    normalizer = normalizers.Sequence(steps)
    numbers: dict[str, int] = {}
    folded = []
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        key = normalizer.normalize_str(text) or text
        if "\ufffd" in text:
            key = tokenizer.backend.id_to_token(token_id)
        folded.append(numbers.setdefault(key, len(numbers)))
    return folded


def write_checkpoint(
    folder: Path, seed: int, spelling: Spelling | None = None, **overrides: Any
) -> Reference:
    """Writes a folder with weights, config and tokenizer; returns the reference of its values.

    Args:
        folder: Where.
        seed: Of the weights.
        spelling: How matrices are stored; None: as floats.
        overrides: Of the config.
    """
    tokenizer = byte_level()
    folded = fold_by_library(tokenizer, BYTE_VOCAB)
    text = tiny_v41(
        vocab_size=BYTE_VOCAB,
        engram_compressed_vocab_size=max(folded) + 1,
        image_token_id=BYTE_VOCAB - 1,
        **overrides,
    )
    config = DeepseekV41Config.from_dict(text)
    model = DeepseekV41ForCausalLM(config, ops=get_reference_op, dtype=torch.float32, device="cpu")
    tensors = random_weights(model.weight_slots(), config.n_routed_experts, seed)
    stored = dict(tensors)
    if spelling is not None:
        stored = {
            name: own
            for key, value in tensors.items()
            for name, own in spelling.spell(key, value).items()
        }
        tensors = decode_plainly(stored, spelling)
    stored["layers.0.ffn.gate.bias_vl"] = torch.zeros(config.n_routed_experts)
    stored["vision.patch.weight"] = torch.zeros(2, 2)
    stored["mtp.0.main_proj.weight"] = torch.zeros(2, 2)
    write_shards(stored.items(), folder, 100_000)
    own = {name: text.pop(name) for name in ("architectures", "model_type", "image_token_id")}
    nested = {**own, "text_config": {**text, "model_type": "deepseek_v41_text"}}
    nested |= {"bos_token_id": 0, "eos_token_id": 1}
    write_config(nested | (spelling.config_fields() if spelling else {}), folder)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    return Reference({**text, **own}, tensors, folded)


def count_block_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns what grows by how many rows each block computes from now on."""
    counts: list[int] = []
    forward = DeepseekV41Block.forward

    def count_rows(block: DeepseekV41Block, streams: torch.Tensor, *others: Any) -> Any:
        counts.append(len(streams))
        return forward(block, streams, *others)

    monkeypatch.setattr(DeepseekV41Block, "forward", count_rows)
    return counts
