"""Environment variables, read on every access so that late changes count.

``envs.VLLM_X`` resolves through the module's ``__getattr__``; a bad value raises ConfigError that
names the variable, the value and what is allowed.
"""

import difflib
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.exceptions import ConfigError

if TYPE_CHECKING:
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_LOGGING_LEVEL: str
    VLLM_LOG_STATS_INTERVAL: float
    VLLM_PREFIX_CACHE_RETENTION_INTERVAL: int | str | None
    VLLM_PIN_SWA_TOKENS: bool
    VLLM_PIN_PREFIX_BLOCKS: bool
    VLLM_PIN_MIN_DROP_SIZE: int
    VLLM_PIN_MAX_SHARE: float
    VLLM_CHECK_INVARIANTS: bool
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES: bool
    VLLM_CPU_KVCACHE_SPACE: float | None
    VLLM_CPU_OMP_THREADS_BIND: str
    VLLM_CPU_AMX_INT8: bool
    VLLM_CPU_INT4_W4A8: bool
    VLLM_CPU_TOWER_INT16: bool
    VLLM_NATIVE: bool
    VLLM_UNASKED_DRAFTS: bool
    VLLM_NATIVE_LIBRARY: str | None
    VLLM_BATCH_INVARIANT: bool
    VLLM_CUDA_REFERENCE: bool
    VLLM_ENGINE_HEARTBEAT_TIMEOUT: float
    VLLM_RAY_ROOM_TIMEOUT: float
    VLLM_API_KEY: str | None
    VLLM_SERVER_DEV_MODE: bool
    VLLM_WARM_GRAMMARS: bool
    VLLM_MAX_STOP_STRINGS: int
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: str
    VLLM_RESPONSES_STORE_MAX_RESPONSES: int
    VLLM_RESPONSES_STORE_MAX_BYTES: int
    VLLM_RESPONSES_STORE_MAX_AGE: float
    VLLM_SCRUB_UNCACHED: bool
    VLLM_CACHE_FINGERPRINTS_MAX_REQUESTS: int
    VLLM_CACHE_FINGERPRINTS_MAX_BYTES: int
    VLLM_CACHE_FINGERPRINTS_MAX_AGE: float
    OMP_NUM_THREADS: str | None


def _flag(name: str, default: bool) -> bool:
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return default
    lowered = raw.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name}={raw!r} is not a boolean: use 1 or 0.")


def _number(
    name: str, default: float | None, parse: Callable[[str], Any], minimum: float | None
) -> Any:
    raw = os.environ.get(name)
    if raw is None or raw == "":
        return default
    try:
        value = parse(raw)
    except ValueError as error:
        raise ConfigError(f"{name}={raw!r} is not a number.") from error
    if not math.isfinite(value):
        raise ConfigError(f"{name}={raw!r} is not a finite number.")
    if minimum is not None and value < minimum:
        raise ConfigError(f"{name}={raw!r} is too small: at least {minimum:g}.")
    return value


def _choice(name: str, allowed: tuple[str, ...]) -> str:
    raw = os.environ.get(name) or allowed[0]
    if raw not in allowed:
        raise ConfigError(f"{name}={raw!r} is unknown: use one of {', '.join(allowed)}.")
    return raw


def _share(name: str, default: float) -> float:
    share: float = _number(name, default, float, 0.0)
    if not share <= 1.0:
        raise ConfigError(f"{name}={os.environ[name]!r} is no share: use a number from 0 to 1.")
    return share


def _retention_interval() -> int | str | None:
    """Return None (unset or "none"), a policy's name, or the number of tokens.

    The coordinator validates the range: its message names the scheduler's block size.
    """
    name = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    raw = os.environ.get(name)
    text = "" if raw is None else raw.strip().lower()
    if text in ("", "none"):
        return None
    if text.isidentifier():
        return text  # a policy's name: the configuration knows which there are
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}={raw!r} is no retention interval: use none, auto, 0 or a number of tokens."
        ) from error


def retention_or_default(given: int | str | None) -> int | str | None:
    """Return what a configuration says about window state, else what the variable says.

    The variable is read at the call. Its "none" comes back as "none": None is that nobody said
    anything.
    """
    name = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
    if given is not None or not is_set(name):
        return given
    said = _retention_interval()
    return "none" if said is None else said


def _log_level() -> str:
    raw = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if raw not in allowed:
        raise ConfigError(
            f"VLLM_LOGGING_LEVEL={raw!r} is unknown: use one of {', '.join(allowed)}."
        )
    return raw


_READERS: dict[str, Callable[[], Any]] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": lambda: _flag("VLLM_ENABLE_V1_MULTIPROCESSING", True),
    "VLLM_LOGGING_LEVEL": _log_level,
    "VLLM_LOG_STATS_INTERVAL": lambda: _number("VLLM_LOG_STATS_INTERVAL", 10.0, float, 0.1),
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": _retention_interval,
    # Whether the window a long prompt leaves behind goes to a tier that allocation reaches last.
    "VLLM_PIN_SWA_TOKENS": lambda: _flag(
        "VLLM_PIN_SWA_TOKENS", _flag("VLLM_PIN_PREFIX_BLOCKS", False)
    ),
    # An earlier spelling of the same switch.
    "VLLM_PIN_PREFIX_BLOCKS": lambda: _flag("VLLM_PIN_PREFIX_BLOCKS", False),
    # Blocks a window must drop at once for that; decode steps drop one and pin nothing.
    "VLLM_PIN_MIN_DROP_SIZE": lambda: _number("VLLM_PIN_MIN_DROP_SIZE", 16, int, 0),
    # Share of the pool that may be pinned: without a cap pins flush everything else.
    "VLLM_PIN_MAX_SHARE": lambda: _share("VLLM_PIN_MAX_SHARE", 0.25),
    "VLLM_CHECK_INVARIANTS": lambda: _flag("VLLM_CHECK_INVARIANTS", False),
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": lambda: _flag(
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", True
    ),
    # GiB of host memory for KV blocks on the CPU platform; unset: derived from free memory.
    "VLLM_CPU_KVCACHE_SPACE": lambda: _number("VLLM_CPU_KVCACHE_SPACE", None, float, 0.001),
    "VLLM_CPU_AMX_INT8": lambda: _flag("VLLM_CPU_AMX_INT8", False),
    # What --quantized-inputs auto stands for: 1 int8, else exact.
    "VLLM_CPU_INT4_W4A8": lambda: _flag("VLLM_CPU_INT4_W4A8", False),
    # Whether towers multiply whole numbers of 16 bits.
    "VLLM_CPU_TOWER_INT16": lambda: _flag("VLLM_CPU_TOWER_INT16", False),
    # CPUs that a worker's threads keep to: auto and nobind (any), "0-3,8", by rank "0-3|4-7".
    "VLLM_CPU_OMP_THREADS_BIND": lambda: os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or "auto",
    # Whether a CPU runs a model by the kernels of csrc/, where they are built and have one for it.
    "VLLM_NATIVE": lambda: _flag("VLLM_NATIVE", True),
    # Whether lookups draft where nobody said what drafts (docs/spec_decode.md).
    "VLLM_UNASKED_DRAFTS": lambda: _flag("VLLM_UNASKED_DRAFTS", True),
    # Another build of them, such as `make sanitize`'s.
    "VLLM_NATIVE_LIBRARY": lambda: os.environ.get("VLLM_NATIVE_LIBRARY") or None,
    # Whether a GPU's products have one order of sums in any batch, too.
    "VLLM_BATCH_INVARIANT": lambda: _flag("VLLM_BATCH_INVARIANT", False),
    # Whether the CUDA platform runs on CPU tensors, its kernels in Triton's interpreter: for tests.
    "VLLM_CUDA_REFERENCE": lambda: _flag("VLLM_CUDA_REFERENCE", False),
    "VLLM_ENGINE_HEARTBEAT_TIMEOUT": lambda: _number(
        "VLLM_ENGINE_HEARTBEAT_TIMEOUT", 30.0, float, 0.5
    ),
    # How long cores and workers wait for room on a Ray cluster that no autoscaler enlarges.
    "VLLM_RAY_ROOM_TIMEOUT": lambda: _number("VLLM_RAY_ROOM_TIMEOUT", 60.0, float, 0),
    "VLLM_API_KEY": lambda: os.environ.get("VLLM_API_KEY") or None,
    # Whether routes exist that an open server must not have (reset_prefix_cache, server_info).
    "VLLM_SERVER_DEV_MODE": lambda: _flag("VLLM_SERVER_DEV_MODE", False),
    # Whether an engine's process gets ready for grammars before the first one comes.
    "VLLM_WARM_GRAMMARS": lambda: _flag("VLLM_WARM_GRAMMARS", True),
    "VLLM_MAX_STOP_STRINGS": lambda: _number("VLLM_MAX_STOP_STRINGS", 128, int, 1),
    # OpenTelemetry's own, and its names: how spans are sent to an http:// endpoint.
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": lambda: _choice(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ("http/protobuf", "grpc")
    ),
    # Bounds of what /v1/responses keeps: number, bytes, seconds. Zero responses: nothing is kept.
    "VLLM_RESPONSES_STORE_MAX_RESPONSES": lambda: _number(
        "VLLM_RESPONSES_STORE_MAX_RESPONSES", 10_000, int, 0
    ),
    "VLLM_RESPONSES_STORE_MAX_BYTES": lambda: _number(
        "VLLM_RESPONSES_STORE_MAX_BYTES", 256 * 1024 * 1024, int, 0
    ),
    "VLLM_RESPONSES_STORE_MAX_AGE": lambda: _number(
        "VLLM_RESPONSES_STORE_MAX_AGE", 24 * 3600.0, float, 0
    ),
    "VLLM_SCRUB_UNCACHED": lambda: _flag("VLLM_SCRUB_UNCACHED", False),
    "VLLM_CACHE_FINGERPRINTS_MAX_REQUESTS": lambda: _number(
        "VLLM_CACHE_FINGERPRINTS_MAX_REQUESTS", 10_000, int, 0
    ),
    "VLLM_CACHE_FINGERPRINTS_MAX_BYTES": lambda: _number(
        "VLLM_CACHE_FINGERPRINTS_MAX_BYTES", 64 * 1024 * 1024, int, 0
    ),
    "VLLM_CACHE_FINGERPRINTS_MAX_AGE": lambda: _number(
        "VLLM_CACHE_FINGERPRINTS_MAX_AGE", 24 * 3600.0, float, 0
    ),
    # OpenMP's own, which may be a list ("4,2"): we only ask whether the user chose.
    "OMP_NUM_THREADS": lambda: os.environ.get("OMP_NUM_THREADS") or None,
}


def engine_process_environment() -> dict[str, str]:
    """Return the environment for an engine-core process.

    OpenMP threads that wait for each other spin by default. With fewer idle cores than threads that
    costs milliseconds per operation (measured: 30 times slower steps on 2 busy cores), so they
    sleep instead unless the user chose a policy.
    """
    environment = dict(os.environ)
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment.keys():
        environment["GOMP_SPINCOUNT"] = "0"
    return environment


def check_values() -> None:
    """Read every variable once, so that a bad value is told before anything is started for it.

    Raises:
        ConfigError: A variable's value is wrong.
    """
    for read in _READERS.values():
        read()


def describe_unknown() -> list[str]:
    """Return a sentence for each variable of our prefix that nothing reads: misspelt, or vLLM's.

    Those of the Ascend tree and of the tests' faults have readers of their own.
    """
    own_readers = ("VLLM_ASCEND_", "VLLM_FLEET_")
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith("VLLM_") and name not in _READERS and not name.startswith(own_readers)
    )
    near = {name: difflib.get_close_matches(name, _READERS, 1, 0.85) for name in unknown}
    return [
        f"{name} has no effect: this server reads no such variable"
        + (f"; did you mean {near[name][0]}?" if near[name] else ".")
        for name in unknown
    ]


def is_set(name: str) -> bool:
    """Whether a variable has a value: "none" and unset may both read as None."""
    return bool(os.environ.get(name))


def __getattr__(name: str) -> Any:
    reader = _READERS.get(name)
    if reader is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return reader()


def __dir__() -> list[str]:
    return sorted(_READERS)
