"""From what the user typed to a folder on this machine, and the JSON files in it. Torch-free."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.gguf_file import is_gguf, read_gguf

logger = init_logger(__name__)

EMBEDDED_MODEL_NAME = "deepseek-v4"
_EMBEDDED_DIR = Path(__file__).resolve().parents[2] / "assets" / "deepseek-v4"
_HUB_QUANT = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):([\w.-]+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PART_OF_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
# GGUF files that stand beside a model's own.
_BESIDE = ("mmproj", "mtp-")
_CONFIG_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
# Names and layouts of all architectures that GGUF files have: loaded with the first such file.
_GGUF_CONFIG = "vllm.model_executor.model_loader.gguf_config"
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


def resolve_checkpoint(
    model: str,
    *,
    with_weights: bool = True,
    revision: str | None = None,
    download_dir: str | None = None,
) -> ResolvedCheckpoint:
    """Find the folder of ``model``.

    A local folder, or GGUF file, wins; of a folder whose only weights are one GGUF file, that file.
    ``owner/name:QUANT`` is the GGUF file of that name in a snapshot of the local cache; then
    ``deepseek-v4`` names the embedded checkpoint. Any other name is a hub id, looked up in the
    local Hugging Face cache (``HF_HOME``, or ``download_dir``) first and then online, unless
    HF_HUB_OFFLINE is set.

    Args:
        model: A folder, a .gguf file, ``deepseek-v4`` or a hub id such as ``owner/name``.
        with_weights: Whether a download must bring the weights (``dummy`` ones need none).
        revision: Branch, tag or commit of a hub id; None: main.
        download_dir: Where snapshots are kept instead of the Hugging Face cache.

    Raises:
        ConfigError: Nothing of that name can be had.
    """
    if not model or not model.strip():
        raise ConfigError("The model name is empty: give a folder, a hub id or 'deepseek-v4'.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        _refuse_revision(model, revision, "a local folder")
        return ResolvedCheckpoint(str(_find_in_folder(folder)), False, model)
    if folder.is_file():
        if is_gguf(folder):
            _refuse_revision(model, revision, "a local file")
            return ResolvedCheckpoint(str(folder), False, model)
        raise ConfigError(
            f"model={model!r} is a file: give the folder that holds config.json and the weights, "
            "or a .gguf file."
        )
    if match := _HUB_QUANT.fullmatch(model):
        found = _find_cached_gguf(match[1], match[2], download_dir)
        return ResolvedCheckpoint(found, False, model)
    if model == EMBEDDED_MODEL_NAME:
        _refuse_revision(model, revision, "the checkpoint inside this package")
        return ResolvedCheckpoint(str(_embedded_dir()), True, model)
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model={model!r}: there is no such folder, and it is not a hub id (owner/name)."
        )
    if download_dir is not None:
        download_dir = _check_download_dir(download_dir)
    snapshot = _HubSnapshot(model, revision, download_dir, with_weights)
    return ResolvedCheckpoint(_resolve_hub_id(snapshot), False, model)


def list_aliases(checkpoint: ResolvedCheckpoint) -> tuple[str, ...]:
    """Return what people call a checkpoint on this machine beside what was typed.

    The name of its folder; of a GGUF file its own, with and without the suffix, and the name that
    it gives itself (``general.name``).

    Raises:
        CheckpointError: The GGUF file is broken.
    """
    path = Path(checkpoint.path)
    if checkpoint.is_embedded:
        return ()
    names = [path.name] if path.is_dir() else []
    if is_gguf(path):
        own = read_gguf(path).keys.get("general.name")
        whole = _PART_OF_SPLIT.sub("", path.stem)
        names = [path.name, path.stem, whole, *([own] if isinstance(own, str) else [])]
    aliases = dict.fromkeys(name.strip() for name in names)
    return tuple(name for name in aliases if name and name != checkpoint.name)


def _find_in_folder(folder: Path) -> Path:
    """Return the folder, or the one GGUF file in it where nothing else there holds weights."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith(_BESIDE))
    # Of a split file the first part stands for all.
    whole = [
        file
        for file in files
        if (found := _PART_OF_SPLIT.search(file.stem)) is None or found[0].startswith("-00001-")
    ]
    if not files or any(folder.glob("*.safetensors")):
        return folder
    if len(whole) == 1:
        return whole[0]
    raise ConfigError(
        f"model={str(folder)!r} holds {len(whole)} models in GGUF files: give one of "
        f"{', '.join(file.name for file in (whole or files)[:20])} by its path."
    )


def read_hf_config(
    path: str | Path, drafts: str | Path | None = None, mmproj: str | Path | None = None
) -> dict[str, Any]:
    """Read the ``config.json`` of a checkpoint folder, or what it would be of a GGUF file.

    Args:
        path: The folder, or the file.
        drafts: The GGUF file of a block that drafts, if it has one of its own.
        mmproj: The GGUF file of a tower for pictures, if a GGUF file has one beside it.

    Raises:
        ConfigError: It is absent, unreadable or not a JSON object, or the files do not go together.
        CheckpointError: The GGUF file is broken.
        UnsupportedModelError: It holds a model that is not served.
    """
    if is_gguf(path) and Path(path).is_file():
        read = import_module(_GGUF_CONFIG).read_gguf_config
        config: dict[str, Any] = read(path, drafts, mmproj)
        return config
    if mmproj is not None:
        raise ConfigError(
            f"mmproj={str(mmproj)!r} goes with a model in a GGUF file, and {path} is none: "
            "leave it out, other checkpoints hold their own tower."
        )
    if drafts is not None:
        raise ConfigError(
            f"speculative-config model {str(drafts)!r} is a GGUF file, which drafts for a model in "
            f"a GGUF file, and {path} is none: leave it out."
        )
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist: a checkpoint folder holds config.json, tokenizer.json and "
            "*.safetensors."
        )
    return _read_json_object(file)


def override_config(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values; objects that both hold are merged."""
    merged = dict(config)
    for name, value in overrides.items():
        own = merged.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            value = override_config(own, value)
        merged[name] = value
    return merged


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


def _refuse_revision(model: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"revision={revision!r} chooses a revision of a hub id, but model={model!r} is {kind}: "
            "leave it out, or give the hub id (owner/name)."
        )


def _check_download_dir(download_dir: str) -> str:
    folder = Path(download_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"download_dir={download_dir!r} cannot be made ({error}): give a folder to write to."
        ) from error
    return str(folder)


@dataclass(frozen=True, slots=True)
class _HubSnapshot:
    """What of a hub id is wanted, and where it is kept."""

    model: str
    revision: str | None
    download_dir: str | None
    with_weights: bool

    def __str__(self) -> str:
        at = "" if self.revision is None else f" at revision {self.revision!r}"
        return f"model={self.model!r}{at}"

    @property
    def cache(self) -> str:
        """Where it is looked for, for messages."""
        if self.download_dir is None:
            return "the local Hugging Face cache (HF_HOME)"
        return f"download_dir={self.download_dir!r}"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``snapshot_download``."""
        weights = _WEIGHT_PATTERNS if self.with_weights else ()
        chosen = {"revision": self.revision, "cache_dir": self.download_dir}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"allow_patterns": [*_CONFIG_PATTERNS, *weights], **given}


def _resolve_hub_id(wanted: _HubSnapshot) -> str:
    # Slow to import: only a hub id pays for it.
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    # huggingface_hub's offline and not-in-cache errors derive from OSError, its 404s from
    # HfHubHTTPError, a malformed id is a ValueError.
    expected = (HfHubHTTPError, OSError, ValueError)
    cached: str | None = None
    try:
        cached = snapshot_download(wanted.model, local_files_only=True, **wanted.arguments())
    except expected:
        logger.info("%s is not in %s", wanted, wanted.cache)
    if cached is not None and _looks_complete(Path(cached), wanted.with_weights):
        return cached
    if constants.HF_HUB_OFFLINE and cached is None:
        raise ConfigError(
            f"{wanted}: there is no such folder, it is not in {wanted.cache}, and HF_HUB_OFFLINE "
            "forbids a download. Unset it, download the checkpoint beforehand, or give a folder."
        )
    try:
        return str(snapshot_download(wanted.model, **wanted.arguments()))
    except expected as error:
        if cached is not None:
            # Half a download: let the loader say which shard is missing.
            logger.warning("%s is incomplete in %s and cannot be completed", wanted, wanted.cache)
            return cached
        raise ConfigError(
            f"{wanted}: there is no such folder, it is not in {wanted.cache}, and downloading it "
            f"failed ({type(error).__name__}: {_first_line(error)}). "
            "Give a folder, download it beforehand, or serve the embedded 'deepseek-v4'."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no details"


def _find_cached_gguf(repository: str, quant: str, download_dir: str | None) -> str:
    """Return the file of ``repository:quant`` that a snapshot of the cache holds."""
    # Slow to import: only a hub id pays for it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        folder = Path(snapshot_download(repository, local_files_only=True, cache_dir=download_dir))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model='{repository}:{quant}': {repository} is not in the local Hugging Face cache "
            f"(HF_HOME, or download_dir): download the file beforehand and give its path, or "
            f"`hf download {repository}`."
        ) from error
    files = sorted(folder.rglob("*.gguf"))
    wanted = quant.lower()
    named = [file for file in files if re.split(r"[-.]", file.stem.lower())[-1] == wanted]
    named = named or [file for file in files if wanted in file.stem.lower()]
    # Of a split file the first part stands for all.
    named = [file for file in named if re.search(r"-of-\d{5}$", file.stem) is None] or named[:1]
    if len(named) != 1:
        raise ConfigError(
            f"model='{repository}:{quant}': {len(named)} files of the cached snapshot fit; it "
            f"holds {', '.join(file.name for file in files[:20]) or 'no .gguf file'}."
        )
    return str(named[0])


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
