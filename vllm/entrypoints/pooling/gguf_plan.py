"""How a GGUF file makes vectors: one of its keys, and layers behind a mean.

    A.pooling_type            0 none, 1 mean, 2 first token, 3 last token, 4 a score
    dense_2, dense_3          EmbeddingGemma's two layers, which some files lack

A file has no prompts by name: requests give the text itself.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm.entrypoints.pooling.plan import Normalise, VectorPlan
from vllm.entrypoints.pooling.sentence_files import Dense
from vllm.entrypoints.pooling.vectors import LAST_TOKEN
from vllm.exceptions import CheckpointError, UnsupportedModelError
from vllm.model_executor.model_loader.gguf_config import find_keys
from vllm.utils.gguf_file import GgufFile, GgufTensor, read_gguf

_POOLING = "pooling_type"
_NONE, _SCORE = 0, 4
_POOLINGS = {1: "mean", 2: "cls", 3: LAST_TOKEN}
_LAYERS = ("dense_2.weight", "dense_3.weight")
_RERANKERS = ("qwen3",)
# By how values are stored; blocks of Q8_0 are a scale and 32 codes.
_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])


def read_gguf_plan(path: str, plan: VectorPlan) -> tuple[VectorPlan, bool]:
    """Read how a file makes vectors.

    Args:
        path: The file.
        plan: What goes for a model of which nothing is said.

    Returns:
        The plan, and whether the file ranks by what may come next.

    Raises:
        UnsupportedModelError: It pools in a way that is not known, or ranks by a head of its own.
        CheckpointError: One of its layers does not fit.
    """
    file = read_gguf(path)
    keys = find_keys(file)
    kind = keys.count(_POOLING)
    if kind == _NONE:
        return plan, False
    if kind == _SCORE:
        architecture = str(file.keys.get("general.architecture"))
        if architecture not in _RERANKERS:
            raise UnsupportedModelError(
                f"{path} ranks by a head of its own ({_POOLING}={kind}), which is not supported "
                f"for {architecture!r}; supported: {', '.join(_RERANKERS)}."
            )
        return plan, True
    if kind not in _POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise UnsupportedModelError(
            f"{path} says {_POOLING}={kind}, which is not known; supported: {known}."
        )
    layers = list(_read_layers(file, plan.size))
    size = plan.size if not layers else len(layers[-1].weight)
    pooled = replace(
        plan,
        size=size,
        poolings=(_POOLINGS[kind],),
        layers=(*layers, Normalise()),
        is_trained=True,
    )
    return pooled, False


def _read_layers(file: GgufFile, size: int) -> Iterator[Dense]:
    for name in _LAYERS:
        tensor = file.tensors.get(name)
        if tensor is None:
            continue
        if len(tensor.shape) != 2 or tensor.shape[1] != size:
            raise CheckpointError(
                f"{tensor.file}: {name} has the sizes {list(tensor.shape)}, and what comes before "
                f"it {size} numbers."
            )
        size = tensor.shape[0]
        yield Dense(_read_values(tensor), None, "Identity")


def _read_values(tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Return a matrix's values, widened exactly."""
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    name = tensor.type.name
    if name == "Q8_0":
        blocks = np.frombuffer(data, _Q8_0)
        values = blocks["codes"] * blocks["scale"].astype(np.float32)[:, None]
        return values.astype(np.float32).reshape(tensor.shape)
    if name not in _PLAIN:
        raise UnsupportedModelError(
            f"{tensor.file}: {tensor.name} is of type {name}; supported: {', '.join(_PLAIN)}, Q8_0."
        )
    values = np.frombuffer(data, _PLAIN[name])
    if name == "BF16":
        # The upper half of a float32.
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).reshape(tensor.shape)
