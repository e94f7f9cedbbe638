"""Tenants: who shares a server, with which keys, weights and limits (``--tenants FILE``)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vllm.exceptions import ConfigError

# Who has no key of a tenant, where the file leaves room for such requests.
DEFAULT_TENANT = "default"
# Under which lines of batches run, whoever's they are; no file can name it.
BATCH_TENANT = "~batch"
MAX_TENANTS = 1000
# Behind every class that a file can name.
_LAST_CLASS = 1_000_000
_HASHED = "sha256:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of those who share a server.

    Attributes:
        name: In metrics, logs and errors.
        weight: Its share of the tokens served, beside the weights of others who want some.
        priority: Its class; lower ones go before higher ones, and shares count within a class.
        requests_per_minute: Most requests in a minute; None: any number.
        tokens_per_minute: Most tokens, of prompts and answers; None: any number.
        max_queued_requests: Most requests that wait for their first token; None: any number.
        cache_guaranteed: Share of the KV cache that others cannot flush, 0 to 1.
        cache_at_most: Share above which its prefixes are the first to go, 0 to 1.
        has_own_cache: Whether its prefixes serve nobody else's requests.
    """

    name: str
    weight: float = 1.0
    priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_queued_requests: int | None = None
    cache_guaranteed: float = 0.0
    cache_at_most: float = 1.0
    has_own_cache: bool = False


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What a token counts as served, by what was done for it.

    Attributes:
        input: A prompt's token that had to be computed.
        cached: A prompt's token that was cached.
        output: An answer's token.
    """

    input: float = 1.0
    cached: float = 0.1
    output: float = 4.0


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """All tenants of a server.

    Attributes:
        tenants: By name; ``DEFAULT_TENANT`` is always one of them.
        by_key: Names by the digests of their keys (``digest_key``).
        is_open: Whether requests without a tenant's key are served, as ``DEFAULT_TENANT``'s.
        token_weights: What tokens count.
    """

    tenants: dict[str, Tenant]
    by_key: dict[str, str] = field(default_factory=dict, repr=False)
    is_open: bool = False
    token_weights: TokenWeights = field(default_factory=TokenWeights)

    @classmethod
    def of(cls, *tenants: Tenant, **fields: Any) -> TenantsConfig:
        """Return a configuration of tenants without keys, for programs."""
        named = {DEFAULT_TENANT: Tenant(DEFAULT_TENANT)}
        named.update((tenant.name, tenant) for tenant in tenants)
        return cls(named, **fields)

    def find(self, name: str | None) -> Tenant:
        """Return the tenant of a request that names one; None: of those that have none."""
        return self.tenants.get(name or DEFAULT_TENANT) or self.tenants[DEFAULT_TENANT]


def with_batch_tenant(tenants: TenantsConfig | None) -> TenantsConfig:
    """Return tenants with one more, in whose name lines of batches run: its class is the last.

    Args:
        tenants: Those of a server; None: it has none, and all its requests are alike.
    """
    last = Tenant(BATCH_TENANT, priority=_LAST_CLASS)
    known = TenantsConfig.of(is_open=True) if tenants is None else tenants
    return replace(known, tenants={**known.tenants, BATCH_TENANT: last})


def digest_key(key: str) -> str:
    """Return a key's digest: what is kept of it."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_TokenWeight = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tenant as the file has it."""

    name: str
    keys: list[str] = []
    weight: _Weight = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    max_queued_requests: _Count | None = None
    cache_guaranteed: _Share = 0.0
    cache_at_most: _Share = 1.0
    own_cache: bool = False


class _TokenWeights(msgspec.Struct, forbid_unknown_fields=True):
    input: _TokenWeight = 1.0
    cached: _TokenWeight = 0.1
    output: _TokenWeight = 4.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    tenants: list[_Entry]
    token_weights: _TokenWeights = msgspec.field(default_factory=_TokenWeights)


def read_tenants(path: str) -> TenantsConfig:
    """Read a file of tenants, YAML or JSON.

    Raises:
        ConfigError: It cannot be read, or a value in it is wrong; the error names it, and no key.
    """
    import yaml  # noqa: PLC0415  # only who gives a file pays for the import

    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--tenants {path}: cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        # What PyYAML shows of the file might be a key.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ConfigError(f"--tenants {path}: is neither YAML nor JSON{where}.") from None
    try:
        found = msgspec.convert(raw, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--tenants {path}: {error}. It must hold 'tenants', a list of objects with a name."
        ) from None
    try:
        return _build(found)
    except ConfigError as error:
        raise ConfigError(f"--tenants {path}: {error}") from None


def _build(found: _File) -> TenantsConfig:
    """Check what entries say of each other."""
    if not 0 < len(found.tenants) <= MAX_TENANTS:
        raise ConfigError(
            f"'tenants' has {len(found.tenants)} entries: give 1 to {MAX_TENANTS} of them."
        )
    tenants: dict[str, Tenant] = {}
    by_key: dict[str, str] = {}
    for entry in found.tenants:
        if entry.name in tenants:
            raise ConfigError(f"the tenant {entry.name!r} is there twice: give it once.")
        tenants[entry.name] = _make_tenant(entry)
        for number, key in enumerate(entry.keys, 1):
            digest = _read_key(entry.name, number, key)
            other = by_key.setdefault(digest, entry.name)
            if other != entry.name:
                raise ConfigError(
                    f"key {number} of {entry.name!r} is also one of {other!r}: keys name one."
                )
    guaranteed = math.fsum(tenant.cache_guaranteed for tenant in tenants.values())
    if guaranteed > 1:
        raise ConfigError(
            f"the shares of the cache that are guaranteed sum to {guaranteed:g}: they must not "
            "exceed 1. Lower cache_guaranteed of some tenants."
        )
    weights = found.token_weights
    if not weights.input + weights.cached + weights.output:
        raise ConfigError("'token_weights' are all 0: nothing would count as served.")
    is_open = DEFAULT_TENANT in tenants
    tenants.setdefault(DEFAULT_TENANT, Tenant(DEFAULT_TENANT))
    return TenantsConfig(
        tenants, by_key, is_open, TokenWeights(weights.input, weights.cached, weights.output)
    )


def _make_tenant(entry: _Entry) -> Tenant:
    if not _NAME.fullmatch(entry.name):
        raise ConfigError(
            f"the name {entry.name!r} must be 1 to 64 letters, digits, '.', '_' and '-', and begin "
            "with a letter or digit."
        )
    if bool(entry.keys) == (entry.name == DEFAULT_TENANT):
        raise ConfigError(
            f"the tenant {entry.name!r} has {len(entry.keys)} keys: "
            + (
                "it stands for requests without a tenant's key, so leave 'keys' out."
                if entry.keys
                else f"give at least one, or call it {DEFAULT_TENANT!r} if it shall stand for "
                "requests without a tenant's key."
            )
        )
    if entry.cache_guaranteed > entry.cache_at_most:
        raise ConfigError(
            f"cache_guaranteed={entry.cache_guaranteed:g} of {entry.name!r} is above its "
            f"cache_at_most={entry.cache_at_most:g}: lower the one or raise the other."
        )
    return Tenant(
        entry.name,
        entry.weight,
        entry.priority,
        entry.requests_per_minute,
        entry.tokens_per_minute,
        entry.max_queued_requests,
        entry.cache_guaranteed,
        entry.cache_at_most,
        entry.own_cache,
    )


def _read_key(name: str, number: int, key: str) -> str:
    """Return the digest of a key: the file may hold it in place of the key."""
    if key.startswith(_HASHED):
        digest = key[len(_HASHED) :].lower()
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ConfigError(
                f"key {number} of {name!r} begins with {_HASHED!r}, and 64 hex digits must follow."
            )
        return digest
    if not key or key != key.strip():
        raise ConfigError(
            f"key {number} of {name!r} is empty or has space around it: give a real one."
        )
    return digest_key(key)
