"""The files of sentence-transformers in a checkpoint's folder, in both of their spellings.

    modules.json                           which modules there are, in order
    1_Pooling/config.json                  how rows become a vector
    2_Dense/config.json, model.safetensors a layer behind it
    config_sentence_transformers.json      prompts, similarity, cut
    sentence_bert_config.json              longest text, lowercase

A module that is not known is refused by name: left out, it would change every vector.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.entrypoints.pooling.plan import Layer, Normalise, VectorPlan, YesNo
from vllm.entrypoints.pooling.vectors import POOLINGS, Vector, narrow
from vllm.exceptions import CheckpointError, ConfigError, UnsupportedModelError
from vllm.model_executor.model_loader.safetensors_header import StoredTensor, read_header

MODULES = "modules.json"
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# By the last word of a torch module's name.
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
# What layers take and give where nothing else is said.
_VECTOR = "sentence_embedding"
# Among the kinds of inputs of a checkpoint: its texts are rendered as chats.
_MESSAGE = "message"
# How the first spelling names what the second lists, in the order in which several are joined.
_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A linear layer with an activation.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]``; None: none.
        activation: One of ``_ACTIVATIONS``.
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None
    activation: str

    def __call__(self, vector: Vector) -> Vector:
        """Return the vector behind it."""
        mapped = self.weight @ vector
        if self.bias is not None:
            mapped = mapped + self.bias
        return _activate(mapped, self.activation)


def _activate(values: Vector, name: str) -> Vector:
    if name == "Tanh":
        return np.tanh(values)
    if name == "ReLU":
        return np.maximum(values, np.float32(0))
    if name == "GELU":
        wide = values.astype(np.float64)
        halves = np.array([1 + math.erf(value) for value in wide / math.sqrt(2)])
        return narrow(wide * halves / 2)
    if name in ("Sigmoid", "SiLU"):
        gates = (1 / (1 + np.exp(-values.astype(np.float64)))).astype(np.float32)
        return gates if name == "Sigmoid" else values * gates
    return values


def has_sentence_files(folder: Path) -> bool:
    """Whether a checkpoint says how it makes vectors."""
    return (folder / MODULES).is_file()


def read_plan(folder: Path, row_size: int, *, generates: bool = True) -> VectorPlan:
    """Read how a checkpoint makes vectors.

    Args:
        folder: Its folder, which ``has_sentence_files``.
        row_size: Numbers of a row that is pooled.
        generates: Whether the model also generates text.

    Raises:
        ConfigError: A file is broken, or does not go with the others.
        UnsupportedModelError: A module, pooling or activation is not served.
    """
    poolings: tuple[str, ...] | None = None
    leaves_prompts_out = False
    layers: list[Layer] = []
    scores: YesNo | None = None
    size = row_size
    for kind, path in _read_modules(folder):
        if kind == "Transformer":
            if path:
                raise UnsupportedModelError(
                    f"{folder / MODULES}: its Transformer lies in {path!r}, beside the folder's "
                    "own config.json: move that folder's files up, or name it."
                )
        elif kind == "Pooling":
            own = _read_object(folder / path / "config.json")
            poolings = _read_poolings(own, folder / path / "config.json")
            leaves_prompts_out = own.get("include_prompt") is False
            size = row_size * len(poolings)
        elif kind == "Dense":
            dense = _read_dense(folder / path, size)
            size = len(dense.weight)
            layers.append(dense)
        elif kind == "Normalize":
            layers.append(Normalise())
        elif kind == "LogitScore":
            scores = _read_yes_no(folder / path / "config.json")
        elif kind != "Dropout":  # which does nothing outside training
            raise UnsupportedModelError(
                f"{folder / MODULES}: the module {kind!r} is not supported; supported: "
                "Transformer, Pooling, Dense, Normalize, LogitScore."
            )
    if poolings is None and scores is None:
        raise ConfigError(f"{folder / MODULES} names no module Pooling: nothing makes a vector.")
    settings = _read_object(folder / "config_sentence_transformers.json", {})
    limits = _read_object(folder / "sentence_bert_config.json", {})
    plan = VectorPlan(size=row_size, generates=generates)
    if poolings is not None:
        plan = VectorPlan(
            size=size,
            poolings=poolings,
            layers=tuple(layers),
            leaves_prompts_out=leaves_prompts_out,
            is_trained=True,
            generates=generates,
        )
    return _with_settings(plan, settings, limits, folder, scores)


def _with_settings(
    plan: VectorPlan,
    settings: Mapping[str, Any],
    limits: Mapping[str, Any],
    folder: Path,
    scores: YesNo | None,
) -> VectorPlan:
    name = folder / "config_sentence_transformers.json"
    prompts = settings.get("prompts") or {}
    texts = isinstance(prompts, Mapping) and all(isinstance(t, str) for t in prompts.values())
    if not texts:
        raise ConfigError(f"{name}: prompts must be texts by their names.")
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(f"{name}: default_prompt_name={default!r} is none of its prompts.")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise UnsupportedModelError(
            f"{name}: similarity_fn_name={similarity!r} is not supported; supported: "
            f"{', '.join(_SIMILARITIES)}."
        )
    cut = _read_count(settings, "truncate_dim", name)
    if cut is not None and cut > plan.size:
        raise ConfigError(f"{name}: truncate_dim={cut} is above the {plan.size} numbers there are.")
    renders = _MESSAGE in (limits.get("modality_config") or {}) and scores is None
    if renders and plan.leaves_prompts_out:
        raise UnsupportedModelError(
            f"{folder}: texts are messages of chats (modality_config), and prompts are left out "
            "(include_prompt): the two together are not supported."
        )
    return VectorPlan(
        size=plan.size,
        poolings=plan.poolings,
        layers=plan.layers,
        renders=renders,
        max_tokens=_read_count(limits, "max_seq_length", folder / "sentence_bert_config.json"),
        prompts=dict(prompts),
        default_prompt=default,
        leaves_prompts_out=plan.leaves_prompts_out,
        lowers=bool(limits.get("do_lower_case")),
        similarity=similarity,
        default_size=cut,
        is_trained=plan.is_trained,
        yes_no=scores,
        generates=plan.generates,
    )


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    """Return kind and folder of each module, in order."""
    file = folder / MODULES
    entries = _read_json(file)
    try:
        ordered = sorted(entries, key=lambda entry: entry["idx"])
        return [(entry["type"].rpartition(".")[2], entry["path"]) for entry in ordered]
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} must be a list of objects with idx, path and type ({error!r})."
        ) from error


def _read_poolings(own: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    chosen = own.get("pooling_mode")
    if chosen is None:
        named = [name for field, name in _OLD_NAMES.items() if own.get(field)]
    else:
        named = [chosen] if isinstance(chosen, str) else list(chosen)
    unknown = [name for name in named if name not in POOLINGS]
    if unknown or not named:
        raise UnsupportedModelError(
            f"{file}: pooling {', '.join(map(repr, unknown)) or 'of no kind'} is not supported; "
            f"supported: {', '.join(POOLINGS)}."
        )
    return tuple(named)


def _read_dense(folder: Path, size: int) -> Dense:
    own = _read_object(folder / "config.json")
    for field, plain in (("module_input_name", _VECTOR), ("module_output_name", _VECTOR)):
        if own.get(field) not in (None, plain):
            raise UnsupportedModelError(
                f"{folder / 'config.json'}: {field}={own[field]!r} is not supported, only {plain}."
            )
    if own.get("use_residual"):
        raise UnsupportedModelError(f"{folder / 'config.json'}: use_residual is not supported.")
    activation = str(own.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rstrip("()").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder / 'config.json'}: activation_function={activation!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}."
        )
    if own.get("in_features") != size:
        raise ConfigError(
            f"{folder / 'config.json'}: in_features={own.get('in_features')!r}, but what comes "
            f"before has {size} numbers."
        )
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: other files of weights cannot be read.")
    tensors = {tensor.name: _read_values(tensor) for tensor in read_header(file)}
    weight = tensors.get("linear.weight")
    bias = tensors.get("linear.bias")
    out = own.get("out_features")
    if weight is None or weight.shape != (out, size):
        found = "no linear.weight" if weight is None else f"a linear.weight of {weight.shape}"
        raise ConfigError(f"{file} holds {found}, where ({out}, {size}) is expected.")
    if own.get("bias", True) and (bias is None or bias.shape != (out,)):
        raise ConfigError(f"{file} lacks linear.bias of ({out},).")
    return Dense(np.ascontiguousarray(weight), bias if own.get("bias", True) else None, name)


def read_projection(tensor: StoredTensor) -> Dense:
    """Return what maps a model's rows to those that its files speak of."""
    return Dense(np.ascontiguousarray(_read_values(tensor)), None, "Identity")


def _read_values(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """Return a tensor's values, widened exactly."""
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
    if tensor.dtype not in kinds:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is of type {tensor.dtype}, not {', '.join(kinds)}."
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.num_bytes), kinds[tensor.dtype])
    if tensor.dtype == "BF16":
        # The upper half of a float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(tensor.shape)


def _read_yes_no(file: Path) -> YesNo:
    """Read a reranker's two tokens; what stands around its texts is its chat template's."""
    own = _read_object(file)
    yes, no = (own.get(f"{name}_token_id") for name in ("true", "false"))
    if not (isinstance(yes, int) and isinstance(no, int)):
        raise ConfigError(f"{file} must name true_token_id and false_token_id.")
    return YesNo(yes, no)


def _read_count(fields: Mapping[str, Any], name: str, file: Path) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= math.inf:
        raise ConfigError(f"{file}: {name}={value!r} must be a whole number of at least 1.")
    return value


def _read_object(file: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not file.is_file():
        return default
    found = _read_json(file)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object.")
    return found


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from error
