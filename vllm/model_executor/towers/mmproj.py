"""A tower in a GGUF file of its own (``mmproj-*.gguf``): its sizes and tensors. Torch-free.

A GGUF file of a language model has no eyes; conversion writes them to a second file, of the
architecture "clip". What that says becomes the ``vision_config`` that the release's config.json
would have, and its tensors get the names of ``TowerPlan.tensors``. What conversion changed is
undone:

    kind              changed
    gemma3            the norm in front of the projection is stored with one added
    gemma4v           a patch's pixels lie channel by channel, as a convolution's
    qwen3vl_merger    the two frames of a patch are two tensors
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError
from vllm.model_executor.model_loader.gguf_keys import Keys
from vllm.model_executor.model_loader.safetensors_header import StoredTensor
from vllm.model_executor.towers.plans import CLIP_BOUNDS
from vllm.utils.gguf_file import GgufFile, GgufTensor, read_gguf

if TYPE_CHECKING:
    from torch import Tensor

Combine = Callable[..., "Tensor"]
"""Makes a tower's tensor of those of the file, all fp32."""

_ARCHITECTURE = "clip"
_IN_BLOCK = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(.+)")
# What other senses have.
_OTHERS = ("a.", "mm.a.")
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of a tower, as a file has it.

    Attributes:
        shape: Of the tower's.
        tensors: Of the file.
        combine: Makes the tower's of the file's.
    """

    shape: tuple[int, ...]
    tensors: tuple[GgufTensor, ...]
    combine: Combine

    def describe(self, name: str) -> StoredTensor:
        """Return it as it is once it is decoded, with the place of its first values."""
        first = self.tensors[0]
        return StoredTensor(name, self.shape, "F32", first.file, first.offset, first.num_bytes)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the files of one kind of tower are read.

    Attributes:
        wrappers: Model types of the texts that it goes with -> class and model type of both.
        soft_token: What a soft token is spelled, and the field of its id.
        read: Function (keys) -> fields of config.json, ``vision_config`` among them.
        top: Names outside blocks -> the tower's.
        layer: What stands before the number of a layer.
        parts: Parts of a block -> the tower's.
        colour: Mean and deviation of each colour that the tower reads.
    """

    wrappers: Mapping[str, tuple[str, str]]
    soft_token: tuple[str, str]
    read: Callable[[Keys], dict[str, Any]]
    top: Mapping[str, str]
    layer: str
    parts: Mapping[str, str]
    colour: tuple[float, float] = (0.5, 0.5)


def add_mmproj(text: Mapping[str, Any], tokens: object, path: str | Path) -> dict[str, Any]:
    """Return the config.json of a language model and the tower that a file holds for it.

    Args:
        text: That of the language model.
        tokens: Its vocabulary, spelled.
        path: The tower's file.

    Raises:
        CheckpointError: The file is broken.
        ConfigError: It holds no tower that is served, or one of another model.
    """
    file = read_gguf(path)
    kind, keys = _find_kind(file)
    wrapper = kind.wrappers.get(str(text.get("model_type")))
    if wrapper is None:
        raise ConfigError(
            f"mmproj={str(path)!r} holds the tower of a model of type "
            f"{' or '.join(kind.wrappers)}, and this one is {text.get('model_type')}: give the "
            "file that was made from the same release."
        )
    spelled, field = kind.soft_token
    if not isinstance(tokens, list) or spelled not in tokens:
        raise ConfigError(
            f"mmproj={str(path)!r}: the model's vocabulary has no {spelled}, which stands for "
            "pictures: its file was made without."
        )
    architecture, model_type = wrapper
    shared = ("torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings")
    return {
        **{name: text[name] for name in shared if name in text},
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {name: text[name] for name in text if name != "architectures"},
        field: tokens.index(spelled),
        **kind.read(keys),
    }


def find_pieces(path: str | Path) -> dict[str, Piece]:
    """Return a file's tower by the names of ``TowerPlan.tensors``.

    Raises:
        CheckpointError: The file is broken.
        ConfigError: It holds no tower that is served.
    """
    file = read_gguf(path)
    kind, _ = _find_kind(file)
    pieces: dict[str, Piece] = {}
    for tensor in file.tensors.values():
        if tensor.name.startswith(_OTHERS) or tensor.name == _FRAMES[1]:
            continue
        name = _find_name(kind, tensor.name)
        if name is None or name in pieces:
            raise ConfigError(
                f"{file.path}: towers of this type have no tensor {tensor.name}, so it is one of "
                "a model that is not served."
            )
        pieces[name] = _read_piece(file, tensor, name)
    _join_heads(file, pieces)
    return pieces


def describe_tower(path: str | Path) -> dict[str, StoredTensor]:
    """Return a file's tower as it is once it is decoded; raises as ``find_pieces``."""
    return {name: piece.describe(name) for name, piece in find_pieces(path).items()}


def _find_kind(file: GgufFile) -> tuple[_Kind, Keys]:
    keys, where = Keys(file, _ARCHITECTURE), f"mmproj={str(file.path)!r}"
    found = file.keys.get("general.architecture")
    if found != _ARCHITECTURE:
        raise ConfigError(
            f"{where} is a file of the architecture {found!r}: give the one that holds the tower "
            f"({_ARCHITECTURE!r}, mmproj-*.gguf)."
        )
    name = keys.text("vision.projector_type", keys.text("projector_type", "none"))
    kind = _KINDS.get(name)
    if kind is None:
        raise ConfigError(
            f"{where} holds a tower of type {name!r}; served are {', '.join(_KINDS)}."
        )
    for field, expected in zip(("image_mean", "image_std"), kind.colour, strict=True):
        given = file.keys.get(f"{_ARCHITECTURE}.vision.{field}", [expected])
        if not isinstance(given, list) or any(value != expected for value in given):
            raise keys.refuse(f"vision.{field}", given, f"{expected} for each colour")
    return kind, keys


def _find_name(kind: _Kind, name: str) -> str | None:
    """A tensor's name in the tower; None: towers of this kind have none such."""
    match = _IN_BLOCK.fullmatch(name)
    if match is None:
        return kind.top.get(name)
    number, part, leaf = match.groups()
    ours = kind.parts.get(part)
    if ours is None:
        return None
    # Bounds are numbers of their own; some writers end their names as those of matrices.
    bound = leaf.removesuffix(".weight")
    if bound in CLIP_BOUNDS:
        return f"{kind.layer}.{number}.{ours.removesuffix('.linear')}.{bound}"
    return f"{kind.layer}.{number}.{ours}.{leaf}"


def _read_piece(file: GgufFile, tensor: GgufTensor, name: str) -> Piece:
    shape = tensor.shape
    if name.rpartition(".")[2] in CLIP_BOUNDS and shape == (1,):
        return Piece((), (tensor,), lambda values: values.reshape(()))
    if name == _SOFT_NORM:
        return Piece(shape, (tensor,), lambda values: values - 1.0)
    if name == _PATCHES and len(shape) == 4:
        flat = (shape[0], shape[1] * shape[2] * shape[3])
        return Piece(flat, (tensor,), lambda values: values.permute(0, 2, 3, 1).flatten(1))
    second = file.tensors.get(_FRAMES[1])
    if tensor.name == _FRAMES[0] and second is not None:
        return Piece((*shape[:2], 2, *shape[2:]), (tensor, second), _stack_frames)
    return Piece(shape, (tensor,), lambda values: values)


def _stack_frames(*frames: "Tensor") -> "Tensor":
    first = frames[0]
    stacked = first.new_empty(*first.shape[:2], len(frames), *first.shape[2:])
    for index, frame in enumerate(frames):
        stacked[:, :, index] = frame
    return stacked


def _join_heads(file: GgufFile, pieces: dict[str, Piece]) -> None:
    """Makes one matrix of queries, keys and values where the tower has one, and the file three."""
    for name in [name for name in pieces if ".attn.q." in name]:
        parts = [pieces.pop(name.replace(".q.", f".{part}."), None) for part in "qkv"]
        found = [part for part in parts if part is not None]
        if len(found) != len(parts) or len({part.shape for part in found}) > 1:
            raise ConfigError(f"{file.path}: {name} lacks its keys or values, or they differ.")
        rows = sum(part.shape[0] for part in found)
        tensors = tuple(tensor for part in found for tensor in part.tensors)
        pieces[name.replace(".q.", ".qkv.")] = Piece(
            (rows, *found[0].shape[1:]), tensors, _put_below
        )


def _put_below(*parts: "Tensor") -> "Tensor":
    first = parts[0]
    rows = len(first)
    joined = first.new_empty(rows * len(parts), *first.shape[1:])
    for index, part in enumerate(parts):
        joined[index * rows : (index + 1) * rows] = part
    return joined


def _read_sizes(keys: Keys, **names: str) -> dict[str, Any]:
    """The fields that every kind has, by the names of its config."""
    return {name: keys.integer(f"vision.{key}") for name, key in names.items()}


def _read_gemma3(keys: Keys) -> dict[str, Any]:
    sizes = _read_sizes(
        keys,
        hidden_size="embedding_length",
        intermediate_size="feed_forward_length",
        num_hidden_layers="block_count",
        num_attention_heads="attention.head_count",
        image_size="image_size",
        patch_size="patch_size",
    )
    scale = keys.integer("vision.projector.scale_factor", 4)
    tokens_a_side = sizes["image_size"] // sizes["patch_size"] // scale
    return {
        "mm_tokens_per_image": tokens_a_side**2,
        "vision_config": {
            **sizes,
            "layer_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-6),
        },
    }


def _read_gemma4(keys: Keys) -> dict[str, Any]:
    sizes = _read_sizes(
        keys,
        hidden_size="embedding_length",
        intermediate_size="feed_forward_length",
        num_hidden_layers="block_count",
        num_attention_heads="attention.head_count",
        patch_size="patch_size",
    )
    tensors = keys.file.tensors
    norm = _find_shape(keys, "v.blk.0.attn_q_norm.weight")
    shared = _find_shape(keys, "v.blk.0.attn_k.weight")
    places = _find_shape(keys, "v.position_embd.weight", min_axes=2)
    return {
        "vision_config": {
            **sizes,
            "head_dim": norm[0],
            "num_key_value_heads": max(1, shared[0] // norm[0]),
            "position_embedding_size": places[-2],
            "pooling_kernel_size": keys.integer("vision.projector.scale_factor", 3),
            "rms_norm_eps": keys.number("vision.attention.layer_norm_epsilon", 1e-6),
            "standardize": any(name.startswith("v.std_") for name in tensors),
            "use_clipped_linears": any("input_min" in name for name in tensors),
        }
    }


def _read_qwen(keys: Keys) -> dict[str, Any]:
    places = _find_shape(keys, "v.position_embd.weight")
    marked = keys.file.keys.get("clip.vision.is_deepstack_layers") or []
    if not isinstance(marked, list):
        raise keys.refuse("vision.is_deepstack_layers", marked, "one truth value for each layer")
    return {
        "vision_config": {
            **_read_sizes(
                keys,
                depth="block_count",
                hidden_size="embedding_length",
                intermediate_size="feed_forward_length",
                num_heads="attention.head_count",
                patch_size="patch_size",
            ),
            "spatial_merge_size": keys.integer("vision.spatial_merge_size", 2),
            "temporal_patch_size": sum(name in keys.file.tensors for name in _FRAMES),
            "num_position_embeddings": places[0],
            "deepstack_visual_indexes": [i for i, is_deep in enumerate(marked) if is_deep],
        }
    }


def _find_shape(keys: Keys, name: str, min_axes: int = 1) -> tuple[int, ...]:
    tensor = keys.file.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{keys.file.path} lacks the tower's {name}.")
    if len(tensor.shape) < min_axes or 0 in tensor.shape:
        raise ConfigError(
            f"{keys.file.path}: the tower's {name} has the shape {list(tensor.shape)}; expected "
            f"are {min_axes} axes or more, none of them 0."
        )
    return tensor.shape


_SIGLIP, _PROJECTOR = "vision_tower.embeddings", "multi_modal_projector"
_SOFT_NORM = f"{_PROJECTOR}.mm_soft_emb_norm.weight"
_PATCHES = "vision_tower.patch_embedder.input_proj.weight"


def _ends(stem: str, ours: str) -> dict[str, str]:
    """A name with a weight and a bias."""
    return {f"{stem}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")}


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "gemma3": _Kind(
            {"gemma3_text": ("Gemma3ForConditionalGeneration", "gemma3")},
            ("<image_soft_token>", "image_token_index"),
            _read_gemma3,
            {
                **_ends("v.patch_embd", f"{_SIGLIP}.patch_embedding"),
                "v.position_embd.weight": f"{_SIGLIP}.position_embedding.weight",
                **_ends("v.post_ln", "vision_tower.post_layernorm"),
                "mm.soft_emb_norm.weight": _SOFT_NORM,
                "mm.input_projection.weight": f"{_PROJECTOR}.mm_input_projection_weight",
            },
            "vision_tower.encoder.layers",
            {
                "ln1": "layer_norm1",
                "ln2": "layer_norm2",
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_out": "self_attn.out_proj",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
        ),
        "gemma4v": _Kind(
            {"gemma4_text": ("Gemma4ForConditionalGeneration", "gemma4")},
            ("<|image|>", "image_token_id"),
            _read_gemma4,
            {
                "v.patch_embd.weight": _PATCHES,
                "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
                "v.std_bias": "vision_tower.std_bias",
                "v.std_scale": "vision_tower.std_scale",
                "mm.input_projection.weight": "embed_vision.embedding_projection.weight",
            },
            "vision_tower.encoder.layers",
            {
                "ln1": "input_layernorm",
                "attn_post_norm": "post_attention_layernorm",
                "ln2": "pre_feedforward_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm",
                "attn_q": "self_attn.q_proj.linear",
                "attn_k": "self_attn.k_proj.linear",
                "attn_v": "self_attn.v_proj.linear",
                "attn_out": "self_attn.o_proj.linear",
                "attn_q_norm": "self_attn.q_norm",
                "attn_k_norm": "self_attn.k_norm",
                "ffn_gate": "mlp.gate_proj.linear",
                "ffn_up": "mlp.up_proj.linear",
                "ffn_down": "mlp.down_proj.linear",
            },
            (0.0, 1.0),
        ),
        "qwen3vl_merger": _Kind(
            {
                "qwen3_5_text": ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
                "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
            },
            ("<|image_pad|>", "image_token_id"),
            _read_qwen,
            {
                **_ends("v.patch_embd", "visual.patch_embed.proj"),
                "v.position_embd.weight": "visual.pos_embed.weight",
                **_ends("v.post_ln", "visual.merger.norm"),
                **_ends("mm.0", "visual.merger.linear_fc1"),
                **_ends("mm.2", "visual.merger.linear_fc2"),
            },
            "visual.blocks",
            {
                "ln1": "norm1",
                "ln2": "norm2",
                "attn_q": "attn.q",
                "attn_k": "attn.k",
                "attn_v": "attn.v",
                "attn_qkv": "attn.qkv",
                "attn_out": "attn.proj",
                "ffn_up": "mlp.linear_fc1",
                "ffn_down": "mlp.linear_fc2",
            },
        ),
    }
)
