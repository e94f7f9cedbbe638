"""Checkpoints that were made for vectors: what their config.json leaves out, or must not say.

    architectures   Qwen3Model, MistralModel, Gemma3TextModel: a body, saved without output matrix
    text_config     EmbeddingGemma 2: its text part is all that is served
    weights         layers.0... in the place of model.layers.0...
    is_causal       false: trained to see both ways, which its class does not say

Run as the class that config.json names, the last ones give vectors that look right and are not.
Torch-free.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm.exceptions import CheckpointError, UnsupportedModelError
from vllm.model_executor.model_loader.checkpoint_files import find_weight_files, read_headers
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.models.registry import MODELS
from vllm.utils.gguf_file import is_gguf

_BODY = re.compile(r"(\w+?)(?:Text)?Model")
_BOTH_WAYS = re.compile(r"Bi[A-Z]|Bidirectional|Encoder|NVEmbed")
_EMBEDDING_GEMMA2 = "EmbeddingGemma2TextModel"
_SERVED_BOTH_WAYS = ("Gemma3ForCausalLM", _EMBEDDING_GEMMA2)
_SENTENCE_FILES = "modules.json"
_TEXT_LIMITS = "sentence_bert_config.json"
_PROJECTION = "embedding_projection.weight"
_OTHER_SENSES = frozenset({"embed_audio", "embed_vision", "audio_tower", "vision_tower"})
_HEAD = "lm_head.weight"


class VectorCheckpoint(NamedTuple):
    """A checkpoint's config.

    Attributes:
        config: Its config.json, as that of a model that generates.
        generates: Whether it does.
    """

    config: dict[str, Any]
    generates: bool


def read_vector_checkpoint(raw: Mapping[str, Any], path: str | Path) -> VectorCheckpoint:
    """Read a config.json that may be one of a checkpoint for vectors.

    Args:
        raw: Its content.
        path: The checkpoint.

    Raises:
        UnsupportedModelError: It was trained to see both ways, or brings code of its own.
    """
    folder = Path(path)
    config = _as_embedding_gemma2(raw, folder)
    names = config.get("architectures") or []
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    is_for_vectors = folder.is_dir() and (folder / _SENTENCE_FILES).is_file()
    _refuse_both_ways(config, names, has_code=is_for_vectors and "auto_map" in config)
    causal = [_find_causal(name) for name in names]
    is_body = any(name is not None for name in causal)
    if is_body:
        config["architectures"] = [
            name if own is None else own for name, own in zip(names, causal, strict=True)
        ]
    if is_gguf(folder) or not (is_body or is_for_vectors):
        return VectorCheckpoint(config, True)
    has_head = _has_head(folder)
    if has_head is None or has_head:
        return VectorCheckpoint(config, bool(has_head) or not is_body)
    is_tied = bool(config.get("tie_word_embeddings", False))
    config["tie_word_embeddings"] = True
    return VectorCheckpoint(config, is_tied)


def _as_embedding_gemma2(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a config.json; of an EmbeddingGemma 2 that of its text part, which sees both ways."""
    config = dict(raw)
    kind, text = config.get("model_type"), config.get("text_config")
    if kind == "embedding_gemma2" and isinstance(text, Mapping):
        config = {**text, "model_type": "embedding_gemma2_text"}
    elif kind != "embedding_gemma2_text":
        return config
    config |= {"architectures": [_EMBEDDING_GEMMA2], "use_bidirectional_attention": True}
    # Every prompt is a step: its room is that of the longest text, and not of the positions.
    longest = _read_longest(folder)
    if longest is not None:
        positions = config.get("max_position_embeddings")
        config["max_position_embeddings"] = (
            min(longest, positions) if isinstance(positions, int) else longest
        )
    return config


def _read_longest(folder: Path) -> int | None:
    """Return the tokens of the longest text by sentence-transformers' files; None: any."""
    try:
        limits = json.loads((folder / _TEXT_LIMITS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Whoever makes vectors says what is wrong with them.
        return None
    longest = limits.get("max_seq_length") if isinstance(limits, dict) else None
    return longest if type(longest) is int and longest > 0 else None


def find_projection(folder: Path) -> StoredTensor | None:
    """Return the matrix that maps rows to the width of vectors; None: there is none."""
    try:
        stored = read_headers(find_weight_files(folder))
    except CheckpointError:
        # Whoever loads weights says so; random ones come from no file.
        return None
    return next((t for t in stored if _is_projection(t.name)), None)


def _is_projection(name: str) -> bool:
    """Whether a tensor is the text's projection: pictures and sounds have their own."""
    return name.endswith(_PROJECTION) and not _OTHER_SENSES.intersection(name.split("."))


def _find_causal(name: str) -> str | None:
    """Return the model that generates of which a class is the body; None: it is no body."""
    match = _BODY.fullmatch(name)
    causal = None if match is None else f"{match[1]}ForCausalLM"
    return causal if causal in MODELS and name not in MODELS else None


def _refuse_both_ways(config: Mapping[str, Any], names: list[str], *, has_code: bool) -> None:
    advice = "Its vectors would look right and be wrong. Serve it with the code it comes with."
    if config.get("is_causal") is False:
        raise UnsupportedModelError(
            f"config.json says is_causal=false: {', '.join(names) or 'the model'} was trained to "
            f"see tokens on both sides, which is not supported for it. {advice}"
        )
    both = config.get("use_bidirectional_attention") is True
    if both and any((_find_causal(name) or name) not in _SERVED_BOTH_WAYS for name in names):
        raise UnsupportedModelError(
            f"config.json says use_bidirectional_attention=true, which is supported for "
            f"{' and '.join(_SERVED_BOTH_WAYS)} alone, not for {', '.join(names)}. {advice}"
        )
    for name in names:
        if name not in MODELS and _BOTH_WAYS.search(name):
            raise UnsupportedModelError(
                f"the architecture {name} sees tokens on both sides, which is not supported for "
                f"it. {advice}"
            )
    if has_code:
        raise UnsupportedModelError(
            "config.json names code of its own (auto_map) for a checkpoint that makes vectors, "
            f"such as attention to both sides; no code of a model is ever run here. {advice}"
        )


def _has_head(folder: Path) -> bool | None:
    """Whether a checkpoint has an output matrix; None: it has no weights to look at."""
    try:
        stored = read_headers(find_weight_files(folder))
    except CheckpointError:
        # Whoever loads them says what is wrong.
        return None
    return any(tensor.name.endswith(_HEAD) for tensor in stored)
