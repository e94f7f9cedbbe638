"""From what the user typed to a folder on this machine, and the JSON files in it. Torch-free."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.exceptions import ConfigError
from vllm.logger import init_logger

logger = init_logger(__name__)

EMBEDDED_MODEL_NAME = "deepseek-v4"
_EMBEDDED_DIR = Path(__file__).resolve().parents[2] / "assets" / "deepseek-v4"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
_WEIGHT_PATTERNS = ("*.safetensors",)


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """Where a checkpoint lies.

    Attributes:
        path: The local folder.
        is_embedded: Whether it is the checkpoint inside this package.
        name: What the user typed.
    """

    path: str
    is_embedded: bool
    name: str


def resolve_checkpoint(model: str, *, with_weights: bool = True) -> ResolvedCheckpoint:
    """Find the folder of ``model``.

    A local folder wins; then ``deepseek-v4`` names the embedded checkpoint; any other name is a hub
    id, looked up in the local Hugging Face cache (``HF_HOME``) first and online second.

    Args:
        model: A folder, ``deepseek-v4`` or a hub id such as ``owner/name``.
        with_weights: Whether a download must bring the weights (``dummy`` ones need none).

    Raises:
        ConfigError: Nothing of that name can be had.
    """
    if not model or not model.strip():
        raise ConfigError("The model name is empty: give a folder, a hub id or 'deepseek-v4'.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return ResolvedCheckpoint(str(folder), False, model)
    if folder.is_file():
        raise ConfigError(
            f"model={model!r} is a file: give the folder that holds config.json and the weights."
        )
    if model == EMBEDDED_MODEL_NAME:
        return ResolvedCheckpoint(str(_embedded_dir()), True, model)
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model={model!r}: there is no such folder, and it is not a hub id (owner/name)."
        )
    return ResolvedCheckpoint(_resolve_hub_id(model, with_weights), False, model)


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint folder.

    Raises:
        ConfigError: It is absent, unreadable or not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist: a checkpoint folder holds config.json, tokenizer.json and "
            "*.safetensors."
        )
    return _read_json_object(file)


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Read the ``generation_config.json`` of a checkpoint folder; empty when it has none.

    Raises:
        ConfigError: It exists but is unreadable or not a JSON object.
    """
    file = Path(path) / "generation_config.json"
    return _read_json_object(file) if file.is_file() else {}


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} holds a {type(value).__name__}, but must hold a JSON object.")
    return value


def _embedded_dir() -> Path:
    if not (_EMBEDDED_DIR / "config.json").is_file():
        raise ConfigError(
            f"The embedded checkpoint is missing from {_EMBEDDED_DIR}: reinstall the package, or "
            "give a folder or a hub id."
        )
    return _EMBEDDED_DIR


def _resolve_hub_id(model: str, with_weights: bool) -> str:
    try:
        # Optional, and slow to import: only a hub id pays for it.
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"model={model!r}: there is no such folder, and hub ids need the huggingface_hub "
            "package (pip install huggingface_hub)."
        ) from error
    patterns = [*_CONFIG_PATTERNS, *(_WEIGHT_PATTERNS if with_weights else ())]
    # huggingface_hub's offline and not-in-cache errors derive from OSError, its 404s from
    # HfHubHTTPError, a malformed id is a ValueError.
    expected = (HfHubHTTPError, OSError, ValueError)
    cached: str | None = None
    try:
        cached = snapshot_download(model, allow_patterns=patterns, local_files_only=True)
    except expected:
        logger.info("%s is not in the local Hugging Face cache: trying to download it", model)
    if cached is not None and _looks_complete(Path(cached), with_weights):
        return cached
    try:
        return str(snapshot_download(model, allow_patterns=patterns))
    except expected as error:
        if cached is not None:
            # Half a download: let the loader say which shard is missing.
            logger.warning("%s is incomplete in the local cache and cannot be completed", model)
            return cached
        raise ConfigError(
            f"model={model!r}: there is no such folder, it is not in the local Hugging Face cache, "
            f"and downloading it failed ({type(error).__name__}: {_first_line(error)}). "
            "Give a folder, download it beforehand, or serve the embedded 'deepseek-v4'."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no details"


def _looks_complete(folder: Path, with_weights: bool) -> bool:
    """Whether a cached snapshot has its config and, when wanted, every shard its index names."""
    if not (folder / "config.json").is_file():
        return False
    if not with_weights or (folder / "model.safetensors").is_file():
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return False
    shards = _read_json_object(index).get("weight_map", {})
    return isinstance(shards, dict) and all(
        (folder / str(shard)).is_file() for shard in set(shards.values())
    )
