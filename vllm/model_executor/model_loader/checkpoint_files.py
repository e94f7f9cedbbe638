"""The weight files of a checkpoint: a folder of safetensors, or a GGUF file. Torch-free."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm.exceptions import CheckpointError
from vllm.model_executor.model_loader.safetensors_header import StoredTensor, read_header
from vllm.utils.gguf_file import find_parts, is_gguf, read_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".gguf")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_NAMED = 20


def name_some(names: Iterable[str]) -> str:
    """Return up to twenty names, and how many more there are."""
    listed = list(names)
    text = ", ".join(listed[:_MAX_NAMED])
    more = len(listed) - _MAX_NAMED
    return f"{text} and {more} more" if more > 0 else text


def find_weight_files(checkpoint: Path) -> tuple[Path, ...]:
    """Return the files that hold a checkpoint's weights, sorted.

    Whatever names a checkpoint by its weights asks this, and so works for every kind that loads.

    Args:
        checkpoint: A GGUF file (the first of its parts stands for all), or a folder of
            safetensors files: ``model.safetensors`` is preferred, then the shards its index
            names, then (no index) all safetensors files there are.

    Raises:
        CheckpointError: There are none, the index is broken, or a shard or part is missing.
    """
    return find_parts(checkpoint) if is_gguf(checkpoint) else _find_in_folder(checkpoint)


def _find_in_folder(folder: Path) -> tuple[Path, ...]:
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    index = folder / INDEX_FILE
    if index.is_file():
        names = sorted(set(read_weight_map(index).values()))
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        names = sorted({*names, *_siblings(names)})
    if not names:
        raise CheckpointError(
            f"{folder} holds no weights: expected {SINGLE_FILE}, or shards with {INDEX_FILE}. "
            f"{_advise_on_others(folder)}; --load-format dummy needs no weights."
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of its {len(names)} weight files: "
            f"{name_some(missing)}. Download them again."
        )
    return tuple(folder / name for name in names)


def _advise_on_others(folder: Path) -> str:
    """Return what to do about weights of other formats, which are named."""
    found = sorted(file for file in folder.glob("*") if file.suffix in _OTHER_SUFFIXES)
    gguf = [file for file in found if file.suffix == ".gguf"]
    if gguf:
        return f"To serve a GGUF file, give its own path ({gguf[0]})"
    named = f" ({name_some([file.name for file in found])})" if found else ""
    return f"Other formats{named} must be converted to safetensors"


def read_weight_map(index: Path) -> dict[str, str]:
    """Return an index file's map from tensor name to the name of its file.

    Raises:
        CheckpointError: The index is not what it should be.
    """
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a valid index of weights: {error!r}.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object with tensor names.")
    for name, file in weight_map.items():
        # A file elsewhere on the disk is nothing that an index may name.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: weight_map[{name!r}] must be a file name, not {file!r}."
            )
    return weight_map


def describe_weights(checkpoint: Path) -> list[StoredTensor]:
    """Return what the headers say of a checkpoint's tensors, as its files name and store them.

    Of a GGUF file ``dtype`` is the name of the type of its blocks, and ``shape`` counts values.

    Raises:
        CheckpointError: A file is missing or broken.
        UnsupportedFeatureError: A GGUF file holds a type that is not served.
    """
    if not is_gguf(checkpoint):
        return read_headers(find_weight_files(checkpoint))
    return [
        StoredTensor(item.name, item.shape, item.type.name, item.file, item.offset, item.num_bytes)
        for item in read_gguf(checkpoint).tensors.values()
    ]


def read_headers(files: Iterable[Path]) -> list[StoredTensor]:
    """Return every tensor the files hold, without reading its values.

    Where an index lies beside the files, each must hold the tensors it gives them.

    Raises:
        CheckpointError: A file is broken, or another one than the index describes.
    """
    paths = list(files)
    stored = [tensor for file in paths for tensor in read_header(file)]
    folders = {file.parent for file in paths if file.name != SINGLE_FILE}
    for folder in folders:
        index = folder / INDEX_FILE
        if index.is_file():
            _check_index(read_weight_map(index), stored)
    return stored


def _check_index(weight_map: Mapping[str, str], stored: Iterable[StoredTensor]) -> None:
    found = {(tensor.name, tensor.file.name) for tensor in stored}
    absent = sorted(entry for entry in weight_map.items() if entry not in found)
    if absent:
        files = sorted({file for _, file in absent})
        raise CheckpointError(
            f"{name_some(files)} lacks {len(absent)} tensors that {INDEX_FILE} promises: "
            f"{name_some(name for name, _ in absent)}. Download it again."
        )


def _siblings(names: Iterable[str]) -> Iterable[str]:
    """The shards that numbered names like a-00001-of-00003.safetensors imply."""
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, number, count = match.groups()
            for i in range(1, int(count) + 1):
                yield f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors"
