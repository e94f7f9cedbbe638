"""Tiny checkpoint folders of every family, as transformers writes them, with a tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.model_executor.models.decoder.reference import (
    build_hf_model,
    gemma3,
    gemma4_small,
    gpt_oss,
    llama,
    mistral,
    qwen3,
    qwen3_5,
    qwen3_moe,
)
from tests.tokenizers.family_tokenizers import byte_level, spaced
from vllm.tokenizers import Tokenizer

VOCAB_SIZE = 320

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": gemma3(vocab_size=VOCAB_SIZE),
    "gemma4": gemma4_small(vocab_size=VOCAB_SIZE),
    "gpt-oss": gpt_oss(vocab_size=VOCAB_SIZE),
    "llama": llama(vocab_size=VOCAB_SIZE),
    "mistral": mistral(vocab_size=VOCAB_SIZE),
    "qwen3": qwen3(vocab_size=VOCAB_SIZE),
    "qwen3-moe": qwen3_moe(vocab_size=VOCAB_SIZE),
    "qwen3.5": qwen3_5(vocab_size=VOCAB_SIZE),
}


def write_checkpoint(family: str, folder: Path) -> Any:
    """Write a family's checkpoint; returns transformers' model."""
    return write_model(FAMILIES[family], folder, spaced() if family == "gemma3" else byte_level())


def write_model(raw: dict[str, Any], folder: Path, tokenizer: Tokenizer) -> Any:
    """Write the checkpoint of a config.json; returns transformers' model."""
    model = build_hf_model(raw, seed=7)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    config = {**tokenizer.template_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def generate_greedily(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the reference's answer; every forward pass computes the whole prefix anew."""
    known = list(token_ids)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([known]), use_cache=False).logits
            known.append(int(logits[0, -1].argmax()))
    return known[len(token_ids) :]


def assert_greedy(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Holds that each token is the reference's most probable one behind those before it.

    One pass checks a whole answer.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
