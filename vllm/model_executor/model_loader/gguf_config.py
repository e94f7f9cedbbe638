"""A GGUF file's keys as the config.json that its model would have. Torch-free."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.exceptions import ConfigError, UnsupportedModelError
from vllm.model_executor.model_loader.gguf_architectures import Architecture, find_architecture
from vllm.model_executor.model_loader.gguf_keys import Keys
from vllm.model_executor.towers.mmproj import add_mmproj
from vllm.utils.gguf_file import GgufFile, read_gguf

_UNNUMBERED = "mtp.0.e_proj.weight"
_DRAFTING = "nextn_predict_layers"
_IN_BLOCK = re.compile(r"blk\.(\d+)\.")
# Layers of a file without any, of which a header alone is read.
_MOST_EMPTY = 4096
_BOTH_WAYS = "use_bidirectional_attention"
# Tokens that end an answer, by the names of their keys, and by how they are spelled: of those that
# are no text.
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SPELLED_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<｜end▁of▁sentence｜>")
_CONTROL = 3


def read_gguf_config(
    path: str | Path, drafts: str | Path | None = None, mmproj: str | Path | None = None
) -> dict[str, Any]:
    """Return what a file's config.json would say.

    Args:
        path: The file.
        drafts: The file of a block that drafts, if it has one of its own.
        mmproj: The file of its tower for pictures, if it has one.

    Raises:
        CheckpointError: A file is broken.
        UnsupportedModelError: Its architecture is not served.
        ConfigError: A key is missing or of the wrong type, or the files do not go together.
    """
    file = read_gguf(path)
    own = find_architecture(file)
    keys = find_keys(file)
    _check_blocks(file, keys)
    if not keys.boolean("attention.causal", True) and not own.said.get(_BOTH_WAYS):
        raise UnsupportedModelError(
            f"{path} says attention.causal=false: it was trained to see tokens on both sides, "
            "which is not supported for its architecture. Its vectors would look right and be "
            "wrong."
        )
    config = {
        **_read_common(keys),
        "architectures": [own.model],
        "model_type": own.model_type,
        **own.said,
        **own.read(keys),
    }
    for take in own.takes:
        config |= take.read(keys)
    if own.text_type:
        text = {**config, "model_type": own.text_type}
        config = {name: config[name] for name in ("architectures", "model_type", "torch_dtype")}
        config["text_config"] = text
    if drafts is not None:
        check_drafts(file, read_gguf(drafts))
    if own.drafts is not None:
        count = int(drafts is not None or _has_drafts(file, own))
        config.get("text_config", config)[own.drafts.count] = count
    if mmproj is not None:
        config = add_mmproj(config, file.keys.get("tokenizer.ggml.tokens"), mmproj)
    return config


def find_keys(file: GgufFile) -> Keys:
    """Return what reads the keys of a file's architecture."""
    return Keys(file, str(file.keys.get("general.architecture")))


def count_layers(file: GgufFile) -> int:
    """Return how many of a file's blocks are layers: those behind them draft tokens.

    Raises:
        ConfigError: As ``read_gguf_config``.
    """
    keys = find_keys(file)
    blocks, drafting = keys.integer("block_count"), keys.count(_DRAFTING)
    if drafting >= blocks:
        raise keys.refuse(_DRAFTING, drafting, f"less than block_count, {blocks}")
    return blocks - drafting


def _check_blocks(file: GgufFile, keys: Keys) -> None:
    """Refuse a number of layers that the file has not, before anything is made for each.

    Raises:
        ConfigError: As ``read_gguf_config``.
    """
    held = {match[1] for name in file.tensors if (match := _IN_BLOCK.match(name))}
    if held and count_layers(file) > len(held):
        allowed = f"at most the {len(held)} blocks that the file holds, and those that draft"
        raise keys.refuse("block_count", keys.integer("block_count"), allowed)
    if not held and count_layers(file) > _MOST_EMPTY:
        raise keys.refuse("block_count", keys.integer("block_count"), f"at most {_MOST_EMPTY}")


def check_drafts(file: GgufFile, drafts: GgufFile) -> None:
    """Refuse a file of drafts that is not for a model.

    Raises:
        ConfigError: It is of another model, or of a kind that is not served.
    """
    asked = f"{drafts.path} is no file of drafts for {file.path}"
    names = [str(each.keys.get("general.architecture")) for each in (file, drafts)]
    if names[1] == "dflash":
        raise ConfigError(
            f"{drafts.path} holds a DSpark drafter, which is not served: give a file of a "
            "multi-token-prediction block (mtp-*.gguf), or use method 'ngram'."
        )
    if names[0] != names[1]:
        raise ConfigError(
            f"{asked}: its architecture is {names[1]!r}, and the model's {names[0]!r}"
        )
    own = find_architecture(file)
    if own.drafts is None or not _has_drafts(drafts, own):
        raise ConfigError(
            f"{asked}: it holds no block that is served as one (nextn.eh_proj, or mtp.0.e_proj); "
            "use method 'ngram'"
        )
    widths = [find_keys(each).integer("embedding_length") for each in (file, drafts)]
    # A block that is named by no number may follow any layer.
    is_numbered = _UNNUMBERED not in drafts.tensors
    layers = [count_layers(each) for each in (file, drafts if is_numbered else file)]
    if widths[0] != widths[1] or layers[0] != layers[1]:
        raise ConfigError(
            f"{asked}: it is of a model of {layers[1]} layers {widths[1]} wide, not of "
            f"{layers[0]} layers {widths[0]} wide"
        )


def _has_drafts(file: GgufFile, own: Architecture) -> bool:
    """Whether a block behind the layers drafts: files may count one that they have not."""
    first = f"blk.{count_layers(file)}.nextn.eh_proj.weight"
    return own.drafts is not None and (first in file.tensors or _UNNUMBERED in file.tensors)


def _read_common(keys: Keys) -> dict[str, Any]:
    tokens = keys.file.keys.get("tokenizer.ggml.tokens")
    vocab_size = len(tokens) if isinstance(tokens, list) else keys.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": count_layers(keys.file),
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "torch_dtype": "bfloat16",
        **_read_end_tokens(keys.file.keys),
    }


def _read_end_tokens(keys: Mapping[str, Any]) -> dict[str, Any]:
    found = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    spelled, kinds = (keys.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(spelled, list) and isinstance(kinds, list):
        # By number, to look at each token once.
        ids = {token: index for index, token in enumerate(spelled[: len(kinds)])}
        own = [ids[end] for end in _SPELLED_ENDS if end in ids]
        found += [index for index in own if kinds[index] == _CONTROL]
    ends = list(dict.fromkeys(token_id for token_id in found if type(token_id) is int))
    tokens: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    if type(bos := keys.get("tokenizer.ggml.bos_token_id")) is int:
        tokens["bos_token_id"] = bos
    return tokens
