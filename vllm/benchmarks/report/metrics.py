"""From observations to the numbers of a run, under the names people know from vLLM."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.benchmarks.client.observation import Observation
from vllm.exceptions import ConfigError

# Name on the command line and in JSON -> heading.
METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
SHORT = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between neighbours; 0 of no samples."""
    if not samples:
        return 0.0
    ordered = sorted(samples)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentile_name(percent: float) -> str:
    """Return "p99" or "p99.9"."""
    return f"p{int(percent)}" if percent == int(percent) else f"p{percent}"


def summarize(samples: Sequence[float], name: str, percents: Iterable[float]) -> dict[str, float]:
    """Return mean, median, deviation and percentiles under a metric's names."""
    count = len(samples)
    mean = sum(samples) / count if count else 0.0
    variance = sum((s - mean) ** 2 for s in samples) / count if count else 0.0
    made = {
        f"mean_{name}": mean,
        f"median_{name}": percentile(samples, 50),
        f"std_{name}": math.sqrt(variance),
    }
    for percent in percents:
        made[f"{percentile_name(percent)}_{name}"] = percentile(samples, percent)
    return made


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parse ``--percentile-metrics``.

    Raises:
        ConfigError: One is unknown.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"metric {unknown[0]!r} is unknown: use {', '.join(METRICS)}.")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Parse ``--metric-percentiles``.

    Raises:
        ConfigError: One is no number from 0 to 100.
    """
    try:
        percents = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--metric-percentiles {text!r} must be numbers, as 50,99.") from error
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles {text!r} must be from 0 to 100.")
    return percents


def parse_goodput(entries: Sequence[str]) -> dict[str, float]:
    """Parse ``--goodput ttft:500 tpot:50`` (milliseconds).

    Raises:
        ConfigError: One is no such limit.
    """
    limits: dict[str, float] = {}
    for entry in entries:
        name, _, text = entry.partition(":")
        try:
            limits[name] = float(text)
        except ValueError as error:
            raise ConfigError(f"--goodput {entry!r} must be METRIC:MILLISECONDS.") from error
        if name not in ("ttft", "tpot", "e2el") or not limits[name] >= 0:
            raise ConfigError(f"--goodput {entry!r}: use ttft, tpot or e2el, and at least 0 ms.")
    return limits


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """What a run came to.

    Attributes:
        values: By the names of the JSON result.
        samples_ms: By metric, one value a request (of itl: a gap).
    """

    values: dict[str, Any]
    samples_ms: dict[str, list[float]]


def measure(
    seen: Sequence[Observation],
    duration_s: float,
    percents: Sequence[float],
    goodput: Mapping[str, float],
) -> RunNumbers:
    """Turn observations into numbers; failed requests count as failed and for nothing else."""
    done = [o for o in seen if o.success]
    duration = max(duration_s, 1e-9)
    num_input = sum(o.num_prompt_tokens for o in done)
    num_output = sum(o.num_output_tokens for o in done)
    samples = {
        "ttft": [1e3 * o.ttft_s for o in done],
        "tpot": [1e3 * o.tpot_s for o in done if o.num_output_tokens > 1],
        "itl": [1e3 * gap for o in done for gap in o.itls_s],
        "e2el": [1e3 * o.latency_s for o in done],
    }
    values: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(seen) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": _count_good(done, goodput) / duration if goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(seen),
        # Audio seconds per second; nothing here has audio.
        "rtfx": None,
    }
    for name in METRICS:
        values |= summarize(samples[name], f"{name}_ms", percents)
    return RunNumbers(values, samples)


def _count_good(done: Sequence[Observation], limits_ms: Mapping[str, float]) -> int:
    def is_good(o: Observation) -> bool:
        times = {"ttft": o.ttft_s, "tpot": o.tpot_s, "e2el": o.latency_s}
        return all(1e3 * times[name] <= limit for name, limit in limits_ms.items())

    return sum(map(is_good, done))


def peak_tokens_per_s(done: Iterable[Observation]) -> float:
    """Return the most tokens that came within one second of the run's clock.

    A chunk of several tokens counts as the answer's mean per chunk.
    """
    seconds: dict[int, float] = {}
    for o in done:
        if o.chunk_s:
            per_chunk = o.num_output_tokens / len(o.chunk_s)
            for time in o.chunk_s:
                at = int(o.start_s + time)
                seconds[at] = seconds.get(at, 0.0) + per_chunk
    return max(seconds.values(), default=0.0)


def peak_concurrency(seen: Iterable[Observation]) -> int:
    """Return the most requests that were open at a time."""
    changes = sorted(
        change for o in seen for change in ((o.start_s, 1), (o.start_s + o.latency_s, -1))
    )
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def detailed(seen: Sequence[Observation]) -> dict[str, Any]:
    """Return what ``--save-detailed`` adds: one entry a request, in order."""
    return {
        "input_lens": [o.num_prompt_tokens for o in seen],
        "output_lens": [o.num_output_tokens for o in seen],
        "ttfts": [o.ttft_s for o in seen],
        "itls": [o.itls_s for o in seen],
        "latencies": [o.latency_s for o in seen],
        "start_times": [o.start_s for o in seen],
        "queue_times": [o.queue_s for o in seen],
        "generated_texts": [o.text for o in seen],
        "errors": [o.error for o in seen],
        "cached_tokens": [o.usage.cached_tokens for o in seen],
        "turns": [o.turn for o in seen],
        "request_ids": [o.request_id for o in seen],
    }
