"""Checkpoints that say a chosen text: real files, a real tokenizer, weights that look back once.

Every block's output is zero, so the last token alone decides the next one; each piece of the script
is a token of its own, whose embedding points at the piece that follows:

    embedding[piece_i] = e_i        head[piece_(i+1)] = c * e_i
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken

from tests.model_executor.models.decoder.checkpoints import write_checkpoint
from vllm.model_executor.model_loader.resolve import resolve_checkpoint
from vllm.tokenizers import Tokenizer

# The piece a text begins with, and those that follow it.
Script = Mapping[str, Sequence[str]]
_SCALE = 8.0
# gpt-oss tells messages apart by special tokens, Gemma 4 thoughts and calls.
_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")
_MARKS += ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")
# What blocks add to the residual stream, in any family's spelling.
_OUTPUTS = ("wo_b.", ".w2.", "o_proj.", "down_proj", ".per_layer_projection.")


def write_scripted_v4(folder: Path, script: Script) -> None:
    """Write a DeepSeek-V4 checkpoint, made of the embedded one."""
    source = Path(str(resolve_checkpoint("deepseek-v4").path))
    folder.mkdir()
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        shutil.copy(source / name, folder / name)
    tensors = load_file(source / "model.safetensors")
    _write(folder, Tokenizer.from_folder(source), script, tensors, ("embed.weight", "head.weight"))


def write_scripted(family: str, folder: Path, script: Script, template: str) -> None:
    """Write a checkpoint of another family, with a chat template; scripts' last pieces end it."""
    write_checkpoint(family, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(folder / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tokenizer = Tokenizer.from_folder(folder)
    ends = {rest[-1] for rest in script.values()}
    marks = sorted(p for rest in script.values() for p in rest if p in ends or p in _MARKS)
    tokenizer.backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    _write(folder, tokenizer, script, tensors, names)
    generation = {"eos_token_id": [tokenizer.backend.token_to_id(end) for end in sorted(ends)]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    script: Script,
    tensors: dict[str, Any],
    names: tuple[str, str],
) -> None:
    pieces = {piece for start, rest in script.items() for piece in (start, *rest)}
    new = sorted(piece for piece in pieces if tokenizer.token_to_id(piece) is None)
    backend = tokenizer.backend
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in new])
    (folder / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    old_size, width = config["vocab_size"], config["hidden_size"]
    config["tie_word_embeddings"] = False
    config["vocab_size"] = vocab_size = max(old_size, backend.get_vocab_size())
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = vocab_size
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    embedding, head = (torch.zeros(vocab_size, width) for _ in names)
    steps = [
        (before, after)
        for start, rest in script.items()
        for before, after in zip((start, *rest), rest, strict=False)
    ]
    assert len(steps) <= width
    assert len({before for before, _ in steps}) == len(steps), "a piece may stand only once"
    for i, (before, after) in enumerate(steps):
        embedding[backend.token_to_id(before), i] = 1.0
        head[backend.token_to_id(after), i] = _SCALE
    for name, tensor in tensors.items():
        if any(part in name for part in _OUTPUTS):
            tensors[name] = torch.zeros_like(tensor)
        elif name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensor)
        elif tensor.dim() and tensor.shape[0] == old_size:
            grown = torch.zeros(vocab_size, *tensor.shape[1:], dtype=tensor.dtype)
            grown[:old_size] = tensor
            tensors[name] = grown
    for name, made in zip(names, (embedding, head), strict=True):
        tensors[name] = made.to(tensors[names[0]].dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
