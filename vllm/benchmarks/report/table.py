"""The table that ends a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.benchmarks.report.metrics import METRICS, SHORT, percentile_name

_WIDTH = 50
_MAX_TURNS = 12


def _row(label: str, value: Any, digits: int = 2) -> str:
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}".rstrip()


def _heading(text: str, fill: str = "-") -> str:
    return f"{f' {text} ' if fill == '=' else text:{fill}^{_WIDTH}}"


def format_table(
    values: Mapping[str, Any],
    cache: Mapping[str, Any],
    *,
    metrics: Sequence[str],
    percents: Sequence[float],
    request_rate: float,
    max_concurrency: int | None,
    probes: Mapping[str, Any] | None = None,
) -> str:
    """Return the table of a run.

    Args:
        values: From ``metrics.measure``.
        cache: From ``cache.cache_numbers``.
        metrics: Whose sections to show.
        percents: Of each.
        request_rate: As asked for; infinite ones are left out.
        max_concurrency: As asked for.
        probes: From ``probes.probe_numbers``; None: none were sent.
    """
    lines = [_heading("Serving Benchmark Result", "=")]
    lines.append(_row("Successful requests:", values["completed"]))
    lines.append(_row("Failed requests:", values["failed"]))
    if max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        lines.append(_row("Request rate configured (RPS):", request_rate))
    lines.append(_row("Benchmark duration (s):", values["duration"]))
    lines.append(_row("Total input tokens:", values["total_input_tokens"]))
    lines.append(_row("Total generated tokens:", values["total_output_tokens"]))
    lines.append(_row("Request throughput (req/s):", values["request_throughput"]))
    if values.get("request_goodput") is not None:
        lines.append(_row("Request goodput (req/s):", values["request_goodput"]))
    lines.append(_row("Output token throughput (tok/s):", values["output_throughput"]))
    lines.append(_row("Peak output token throughput (tok/s):", values["max_output_tokens_per_s"]))
    lines.append(_row("Peak concurrent requests:", values["max_concurrent_requests"]))
    lines.append(_row("Total token throughput (tok/s):", values["total_token_throughput"]))
    for name in metrics:
        lines.append(_heading(METRICS[name]))
        lines += _metric_lines(values, name, percents)
    if probes is not None:
        lines.append(_heading("Probes"))
        lines.append(_row("Successful probes:", probes["completed"]))
        lines.append(_row("Failed probes:", probes["failed"]))
        lines += _metric_lines(probes, "ttft", percents)
    lines += _cache_lines(cache, percents)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _metric_lines(values: Mapping[str, Any], name: str, percents: Sequence[float]) -> Iterator[str]:
    short = SHORT[name]
    yield _row(f"Mean {short} (ms):", values[f"mean_{name}_ms"])
    yield _row(f"Median {short} (ms):", values[f"median_{name}_ms"])
    for percent in percents:
        key = percentile_name(percent)
        yield _row(f"{key.upper()} {short} (ms):", values[f"{key}_{name}_ms"])


def _cache_lines(cache: Mapping[str, Any], percents: Sequence[float]) -> list[str]:
    lines = [_heading("Prefix Cache")]
    if not cache:
        return [*lines, "The server reports no cached tokens."]
    lines.append(_row("Cached prompt tokens:", cache["cached_tokens"]))
    lines.append(_row("Hit rate (% of prompt tokens):", 100 * cache["hit_rate"]))
    for kind, label in (("hits", "with hits"), ("misses", "without hits")):
        count = cache["requests_with_hits" if kind == "hits" else "requests_without_hits"]
        lines.append(_row(f"Requests {label}:", count))
        if not count:
            continue
        lines.append(_row(f"Mean TTFT {label} (ms):", cache[f"{kind}_mean_ttft_ms"]))
        lines.append(_row(f"Median TTFT {label} (ms):", cache[f"{kind}_median_ttft_ms"]))
        for percent in percents:
            key = percentile_name(percent)
            lines.append(_row(f"{key.upper()} TTFT {label} (ms):", cache[f"{kind}_{key}_ttft_ms"]))
    turns = cache.get("by_turn", [])
    for row in turns[:_MAX_TURNS]:
        label = f"Turn {row['turn']}: hit rate (%), mean TTFT (ms):"
        lines.append(f"{label:<40} {100 * row['hit_rate']:.2f}, {row['mean_ttft_ms']:.2f}")
    if len(turns) > _MAX_TURNS:
        lines.append(f"... {len(turns) - _MAX_TURNS} more turns in the JSON result")
    for reason, count in cache.get("miss_tokens", {}).items():
        lines.append(_row(f"Missed tokens, {reason}:", count))
    return lines
