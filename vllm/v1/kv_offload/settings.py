"""The connector's own settings, from ``--kv-transfer-config`` or the plain flags."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config.kv_transfer import MAX_WARM, SELECTIVE, WRITE_POLICIES, WRITE_THROUGH
from vllm.exceptions import ConfigError
from vllm.utils.byte_sizes import parse_size
from vllm.v1.kv_offload.store.folder import CacheFolder, core_name, disk_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NAME = "OffloadingConnector"
_FS = "fs"
_LRU = "lru"
# When no size is given: this share of what is free, at most so many bytes.
_FREE_SHARE = 4
_MOST_BYTES = 16 << 30
_KNOWN = (
    "spec_name",
    "cpu_bytes_to_use",
    "secondary_tiers",
    "read_only",
    "always_restore",
    "warm",
    "eviction_policy",
    "store_threshold",
)
# Prefixes that are brought back at the start.
_WARM = 8
_KNOWN_OF_TIER = (
    "type",
    "root_dir",
    "disk_path",
    "max_size",
    "disk_capacity_bytes",
    "read_only",
    "min_free_space",
    "write_policy",
    "write_budget_per_day",
)


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """What an operator may say.

    Attributes:
        root: The folder of this engine core; None: there is no disk tier.
        base: The folder that the operator named: one of several cores has its own in it.
        host_bytes: Host memory for objects; 0: there is no host tier.
        max_bytes: What all its files may take; None: by what is free when it is opened.
        num_cores: Engine cores that share what is free.
        read_only: Read what is there, write nothing, take no lock.
        always_restore: Restore even where computing is quicker; for tests and measurements.
        warm: Prefixes to bring back at the start, before anybody asks for them.
        write_policy: When the disk gets what was computed; see ``WriteGate``.
        write_budget_per_day: Bytes that go to the disk in a day; None: any number.
        min_free_bytes: Of the file system, left to others.
    """

    root: Path | None
    base: Path | None
    host_bytes: int
    max_bytes: int | None
    num_cores: int
    read_only: bool
    always_restore: bool
    warm: int
    write_policy: str = WRITE_THROUGH
    write_budget_per_day: int | None = None
    min_free_bytes: int = 0

    def open_folder(self, hash_root: bytes | None = None) -> CacheFolder:
        """Open this engine core's folder.

        Args:
            hash_root: What prefixes are named by already, if it came from the folder.

        Raises:
            FolderBusyError: Another process writes to it.
            FolderError: It cannot be used.
        """
        assert self.root is not None
        return CacheFolder(
            self.root,
            self.find_max_bytes(),
            read_only=self.read_only,
            num_cores=self.num_cores,
            min_free_bytes=self.min_free_bytes,
            hash_root=hash_root,
        )

    def find_max_bytes(self) -> int:
        """Return what the files may take."""
        if self.max_bytes is not None:
            return self.max_bytes
        assert self.base is not None
        folder = self.base
        while not folder.exists():
            folder = folder.parent
        # What the folder holds already is as good as free.
        free = shutil.disk_usage(folder).free + disk_bytes(self.base)
        return min(_MOST_BYTES, free // _FREE_SHARE) // self.num_cores


def read_settings(config: VllmConfig) -> OffloadSettings:
    """Read and check the settings; touches no file.

    Raises:
        ConfigError: One is unknown, missing or out of range, or the engine cannot keep prefixes.
    """
    transfer, cache = config.kv_transfer_config, config.cache_config
    assert transfer is not None
    if not cache.enable_prefix_caching:
        raise ConfigError(f"{_NAME} keeps cached prefixes, but prefix caching is off: turn it on.")
    if cache.prefix_caching_hash_algo not in ("sha256", "sha256_cbor"):
        raise ConfigError(
            f"prefix_caching_hash_algo={cache.prefix_caching_hash_algo!r} can be forged, and "
            "what is kept on a disk is found by its hash: use sha256 or sha256_cbor."
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f"{_NAME} kv_role={transfer.kv_role!r}: use kv_both.")
    extra = transfer.kv_connector_extra_config
    _refuse_unknown(extra, _KNOWN, "kv_connector_extra_config")
    spec = extra.get("spec_name", "TieringOffloadingSpec")
    if spec != "TieringOffloadingSpec":
        raise ConfigError(
            f"{_NAME} spec_name={spec!r}: use TieringOffloadingSpec, or leave it out."
        )
    host_bytes = _bytes(extra, "cpu_bytes_to_use")
    parallel = config.parallel_config
    num_cores = parallel.data_parallel_size
    tier = _find_tier(extra)
    if tier is None and not host_bytes:
        raise ConfigError(
            f"{_NAME} has nowhere to keep anything: set cpu_bytes_to_use, or one secondary tier: "
            '"secondary_tiers": [{"type": "fs", "root_dir": "DIR", "max_size": "8GiB"}].'
        )
    base, size = (None, None) if tier is None else _read_tier(tier)
    folder = base
    if base is not None and num_cores > 1:
        # Each core keeps what it computed, and takes its share of the limit.
        folder = base / core_name(parallel.data_parallel_index)
    said = tier or {}
    budget = _size(said, "write_budget_per_day")
    _check_eviction(extra)
    return OffloadSettings(
        folder,
        base,
        host_bytes // num_cores,
        None if size is None else size // num_cores,
        num_cores,
        _flag({**extra, **said}, "read_only"),
        _flag(extra, "always_restore"),
        _count(extra, "warm", _WARM, MAX_WARM),
        _read_policy(said, extra),
        None if budget is None else budget // num_cores,
        _size(said, "min_free_space") or 0,
    )


def _check_eviction(extra: dict[str, Any]) -> None:
    """Refuse orders of giving up that there are not."""
    wanted = extra.get("eviction_policy", _LRU)
    if wanted != _LRU:
        raise ConfigError(
            f"{_NAME} eviction_policy={wanted!r}: use {_LRU}, or leave it out. What a conversation "
            "has left behind goes before anything else."
        )


def _read_policy(tier: dict[str, Any], extra: dict[str, Any]) -> str:
    """Return when the disk gets what was computed."""
    threshold = _count(extra, "store_threshold", 0, 2)
    policy = tier.get("write_policy", SELECTIVE if threshold == 2 else WRITE_THROUGH)
    if policy not in WRITE_POLICIES:
        raise ConfigError(
            f"{_NAME} write_policy={policy!r}: use one of {', '.join(WRITE_POLICIES)}."
        )
    return str(policy)


def _size(given: dict[str, Any], name: str) -> int | None:
    """Return a size; None: it is not given."""
    value = given.get(name)
    return None if value is None else parse_size(f"{_NAME} {name}", str(value))


def _read_tier(tier: dict[str, Any]) -> tuple[Path, int | None]:
    """Return a disk tier's folder, and what its files may take, if that is said."""
    root = tier.get("root_dir", tier.get("disk_path"))
    if not isinstance(root, str) or not root:
        raise ConfigError(f"{_NAME} needs a root_dir in its secondary tier: name a folder.")
    if "\0" in root:
        raise ConfigError(f"{_NAME} root_dir={root!r} is no name of a folder: it holds a zero.")
    said = "max_size" if "max_size" in tier else "disk_capacity_bytes"
    folder = Path(os.path.abspath(os.path.expanduser(root)))
    return folder, _size(tier, said)


def _find_tier(extra: dict[str, Any]) -> dict[str, Any] | None:
    tiers = extra.get("secondary_tiers")
    if tiers is None or tiers == []:
        return None
    if not (isinstance(tiers, list) and len(tiers) == 1 and isinstance(tiers[0], dict)):
        raise ConfigError(
            f"{_NAME} needs one secondary tier: "
            '"secondary_tiers": [{"type": "fs", "root_dir": "DIR", "max_size": "8GiB"}].'
        )
    tier: dict[str, Any] = tiers[0]
    _refuse_unknown(tier, _KNOWN_OF_TIER, "secondary_tiers")
    if tier.get("type", _FS) != _FS:
        raise ConfigError(f"{_NAME} secondary tier type={tier['type']!r}: use {_FS!r}.")
    return tier


def _refuse_unknown(given: dict[str, Any], known: tuple[str, ...], what: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(
            f"{_NAME} {what} has unknown keys {', '.join(map(repr, unknown))}: use "
            f"{', '.join(known)}."
        )


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{_NAME} {name}={value!r} must be true or false.")
    return value


def _bytes(given: dict[str, Any], name: str) -> int:
    value = given.get(name, 0)
    if type(value) is str:
        return parse_size(f"{_NAME} {name}", value)
    if type(value) not in (int, float) or not 0 <= value < 1 << 60:
        raise ConfigError(f"{_NAME} {name}={value!r} must be bytes, or a size such as 8GiB.")
    return int(value)


def _count(given: dict[str, Any], name: str, default: int, most: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise ConfigError(f"{_NAME} {name}={value!r} must be a whole number from 0 to {most}.")
    return value
