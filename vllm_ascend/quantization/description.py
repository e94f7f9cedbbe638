"""ModelSlim's ``quant_model_description.json``: which scheme each tensor is stored in. Torch-free.

    {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0",
     "layers.0.attn.wq_b.weight": "W8A8_DYNAMIC",
     "layers.0.attn.wq_b.weight_scale": "W8A8_DYNAMIC",
     "layers.0.attn.wq_b.weight_offset": "W8A8_DYNAMIC",
     "layers.0.attn.q_norm.weight": "FLOAT", ...}

Keys with a dot are tensors; the others are remarks about the whole (or unquantised top-level
tensors) and are not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm.exceptions import CheckpointError, UnsupportedFeatureError
from vllm.model_executor.model_loader.checkpoint_files import name_some
from vllm.model_executor.model_loader.weight_names import published_name

DESCRIPTION_FILE = "quant_model_description.json"
FLOAT = "FLOAT"
W8A8_DYNAMIC = "W8A8_DYNAMIC"
SUPPORTED_SCHEMES = (FLOAT, W8A8_DYNAMIC)

_WEIGHT, _SCALE, _OFFSET = ".weight", ".weight_scale", ".weight_offset"


@dataclass(frozen=True, slots=True)
class QuantDescription:
    """The scheme of every described tensor.

    Attributes:
        schemes: Published tensor name -> a supported scheme.
        source: The file, for messages.
    """

    schemes: Mapping[str, str]
    source: str

    def is_quantised(self, matrix: str) -> bool:
        """Whether the matrix of a published name, without ".weight", is W8A8_DYNAMIC."""
        return self.schemes.get(matrix + _WEIGHT, FLOAT) == W8A8_DYNAMIC

    def quantised_matrices(self) -> list[str]:
        """Return the published names, without ".weight", of the W8A8_DYNAMIC matrices."""
        return [
            name.removesuffix(_WEIGHT)
            for name, scheme in self.schemes.items()
            if scheme == W8A8_DYNAMIC and name.endswith(_WEIGHT)
        ]

    def has_offset(self, matrix: str) -> bool:
        """Whether the checkpoint stores a ``weight_offset`` of the matrix."""
        return matrix + _OFFSET in self.schemes


def read_description(folder: Path) -> QuantDescription | None:
    """Read a checkpoint folder's description; None when it has none.

    Raises:
        CheckpointError: The file is broken or contradicts itself.
        UnsupportedFeatureError: It names a scheme that is not supported.
    """
    file = folder / DESCRIPTION_FILE
    if not file.is_file():
        return None
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}.") from error
    return parse_description(raw, str(file))


def parse_description(raw: Any, source: str) -> QuantDescription:
    """Check a description's content.

    Args:
        raw: The parsed JSON.
        source: The file, for messages.

    Raises:
        CheckpointError: It is no object of names and schemes, names a tensor twice, or lacks the
            scale of a quantised matrix.
        UnsupportedFeatureError: It names a scheme that is not supported.
    """
    if not isinstance(raw, dict):
        raise CheckpointError(f"{source} holds a {type(raw).__name__}, but must hold an object.")
    schemes: dict[str, str] = {}
    for key, scheme in raw.items():
        if "." not in key:
            continue
        if not isinstance(scheme, str):
            raise CheckpointError(f"{source}: {key} is {scheme!r}, but must name a scheme.")
        name = published_name(key)
        if schemes.setdefault(name, scheme) != scheme:
            raise CheckpointError(f"{source} gives {name} two schemes: {schemes[name]}, {scheme}.")
    unsupported = sorted(set(schemes.values()) - set(SUPPORTED_SCHEMES))
    if unsupported:
        examples = name_some(sorted(n for n, s in schemes.items() if s in unsupported))
        raise UnsupportedFeatureError(
            f"{source} uses {', '.join(unsupported)} for {examples}; supported are "
            f"{', '.join(SUPPORTED_SCHEMES)}. Quantise again with one of those."
        )
    _check_quantised(schemes, source)
    return QuantDescription(MappingProxyType(schemes), source)


def _check_quantised(schemes: Mapping[str, str], source: str) -> None:
    for name, scheme in schemes.items():
        if scheme != W8A8_DYNAMIC:
            continue
        matrix = name.rpartition(".")[0]
        if name.endswith(_WEIGHT):
            wanted = matrix + _SCALE
        elif name.endswith((_SCALE, _OFFSET)):
            wanted = matrix + _WEIGHT
        else:
            raise CheckpointError(
                f"{source}: {name} is {scheme}, but only matrices can be (names that end in "
                f"{_WEIGHT}, {_SCALE} or {_OFFSET})."
            )
        if schemes.get(wanted) != W8A8_DYNAMIC:
            raise CheckpointError(
                f"{source}: {name} is {scheme}, so {wanted} must be too, but it is "
                f"{schemes.get(wanted, 'absent')}."
            )
